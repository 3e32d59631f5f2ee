"""An emulated network: Gloo collectives on one machine that take as long as they would between hosts.

No root is needed and any torch.distributed program runs unchanged: ``environment`` names the variables for its ranks.
What is emulated is time only. Every result made with it says so: ``describe``.
"""

from anabranch.lab.emulation.settings import Settings, describe, environment

__all__ = ["Settings", "describe", "environment"]
