"""An emulated network: Gloo collectives on one machine that take as long as they would between hosts.

No root is needed and any torch.distributed program runs unchanged: ``environment`` gives the variables for its ranks.
Only time is emulated. The variables include a note that says so, which every report of a rank repeats.
"""

from anabranch.tools.lab.emulation.settings import EmulatedNetwork, environment

__all__ = ["EmulatedNetwork", "environment"]
