"""Makes torch.distributed build emulated groups. It uses two private names of torch, and checks both."""

from functools import cache, wraps
from inspect import signature
from threading import RLock
from types import ModuleType
from typing import Any

from anabranch.tools.lab.emulation.settings import NETWORK_VARIABLE, EmulatedNetwork

HELPER = "_new_process_group_helper"  # every group that torch's Python makes comes from this function …
GROUP = "ProcessGroup"  # … which builds it from this class and then registers the backends in it


def install(c10d: ModuleType, network: EmulatedNetwork) -> None:
    """Make ``c10d``, which is torch.distributed.distributed_c10d, emulate every Gloo group that it makes from now on.

    Our class is in place of torch's own while the helper builds a group that has a Gloo backend, and only then, because
    the rest of that module recognises groups of every kind by it. torch's backends, options and names all stay.

    torch itself is not used before the first group: this runs while torch is still being imported.
    """
    missing = [name for name in (HELPER, GROUP) if not hasattr(c10d, name)]
    if missing or "backend" not in signature(getattr(c10d, HELPER)).parameters:
        lacks = f"{c10d.__name__} lacks {' and '.join(missing) or f'the argument backend of {HELPER}'}"
        raise RuntimeError(
            f"{NETWORK_VARIABLE} is set, but this torch cannot be emulated: {lacks}. Use a torch that anabranch "
            f"supports, or unset {NETWORK_VARIABLE} to run without emulation"
        )
    real, lock = getattr(c10d, HELPER), RLock()

    @cache  # one class per process, because its groups share one network interface
    def emulated_class() -> type:
        from anabranch.tools.lab.emulation.group import emulated_group

        return emulated_group(network.link)

    @wraps(real)
    def helper(*args: Any, **options: Any) -> Any:
        backend = signature(real).bind(*args, **options).arguments["backend"]
        if "gloo" not in c10d.BackendConfig(backend).get_device_backend_map().values():
            return real(*args, **options)
        with lock:
            stock = getattr(c10d, GROUP)
            setattr(c10d, GROUP, emulated_class())
            try:
                return real(*args, **options)
            finally:
                setattr(c10d, GROUP, stock)

    setattr(c10d, HELPER, helper)
