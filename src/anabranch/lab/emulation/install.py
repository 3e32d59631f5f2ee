"""Where torch.distributed is made to build emulated groups: two private names of torch, both checked."""

from inspect import signature
from threading import RLock
from types import ModuleType
from typing import Any

from anabranch.lab.emulation.settings import VARIABLE, Settings

HELPER = "_new_process_group_helper"  # every group that torch's Python makes comes from this function …
GROUP = "ProcessGroup"  # … which builds it from this class and then registers the backends in it


def install(c10d: ModuleType, settings: Settings) -> None:
    """Let ``c10d``, which is torch.distributed.distributed_c10d, emulate every Gloo group that it makes from now on.

    torch itself is not touched before the first group: this runs while torch is still being imported.
    """
    missing = [name for name in (HELPER, GROUP) if not hasattr(c10d, name)]
    if missing or "backend" not in signature(getattr(c10d, HELPER)).parameters:
        lacks = f"{c10d.__name__} lacks {' and '.join(missing) or f'the argument backend of {HELPER}'}"
        raise RuntimeError(
            f"{VARIABLE} is set and this torch cannot be emulated with: {lacks}. Use a torch that anabranch supports, "
            f"or unset {VARIABLE} to run without emulation"
        )
    setattr(c10d, HELPER, _Helper(c10d, settings))


class _Helper:
    """torch's helper, with our class in place of torch's own while it builds a group that has a Gloo backend.

    torch's own backends, options, registrations and names all stay. Only while it runs: elsewhere in that module the
    class is what every kind of group is recognised by.
    """

    def __init__(self, c10d: ModuleType, settings: Settings) -> None:
        self._c10d, self._settings = c10d, settings
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
            setattr(self._c10d, GROUP, self._emulated())
            try:
                return self._real(*args, **options)
            finally:
                setattr(self._c10d, GROUP, stock)

    def _emulated(self) -> type:
        """One class per process: its groups share one network card."""
        if self._class is None:
            from anabranch.lab.emulation.group import emulated_group

            self._class = emulated_group(self._settings.link)
        return self._class
