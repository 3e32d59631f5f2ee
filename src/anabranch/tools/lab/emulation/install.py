"""Makes torch.distributed build emulated groups. It uses two private names of torch, and checks both."""

from inspect import signature
from threading import RLock
from types import ModuleType
from typing import Any

from anabranch.tools.lab.emulation.settings import NETWORK_VARIABLE, EmulatedNetwork

HELPER = "_new_process_group_helper"  # every group that torch's Python makes comes from this function …
GROUP = "ProcessGroup"  # … which builds it from this class and then registers the backends in it


def install(c10d: ModuleType, network: EmulatedNetwork) -> None:
    """Make ``c10d``, which is torch.distributed.distributed_c10d, emulate every Gloo group that it makes from now on.

    torch itself is not used before the first group: this runs while torch is still being imported.
    """
    missing = [name for name in (HELPER, GROUP) if not hasattr(c10d, name)]
    if missing or "backend" not in signature(getattr(c10d, HELPER)).parameters:
        lacks = f"{c10d.__name__} lacks {' and '.join(missing) or f'the argument backend of {HELPER}'}"
        raise RuntimeError(
            f"{NETWORK_VARIABLE} is set, but this torch cannot be emulated: {lacks}. Use a torch that anabranch "
            f"supports, or unset {NETWORK_VARIABLE} to run without emulation"
        )
    setattr(c10d, HELPER, _EmulatingHelper(c10d, network))


class _EmulatingHelper:
    """torch's helper, with our class in place of torch's own while it builds a group that has a Gloo backend.

    torch's own backends, options, registrations and names all stay. The class is replaced only while the helper runs,
    because the rest of that module recognises groups of every kind by it.
    """

    def __init__(self, c10d: ModuleType, network: EmulatedNetwork) -> None:
        self._c10d = c10d
        self._network = network
        self._real = getattr(c10d, HELPER)
        self._signature = signature(self._real)
        self._lock = RLock()
        self._class: type | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        backend = self._signature.bind(*args, **options).arguments["backend"]
        if "gloo" not in self._c10d.BackendConfig(backend).get_device_backend_map().values():
            return self._real(*args, **options)
        with self._lock:
            stock = getattr(self._c10d, GROUP)
            setattr(self._c10d, GROUP, self._emulated_class())
            try:
                return self._real(*args, **options)
            finally:
                setattr(self._c10d, GROUP, stock)

    def _emulated_class(self) -> type:
        """One class per process, because its groups share one network interface."""
        if self._class is None:
            from anabranch.tools.lab.emulation.group import emulated_group

            self._class = emulated_group(self._network.link)
        return self._class
