"""A timeline drawn in characters: a line per track, a column per slice of time."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.text import Text

from anabranch.tools.report.formatting import plain, seconds
from anabranch.values.timeline import COMPUTE, Timeline

MAX_WIDTH = 110
MAX_TRACKS = 65  # the lanes of the largest plan, and the computation
MAX_LABEL = 12
IDLE = "."


class Gantt:
    """Draws a timeline: ``f`` is forward, ``b`` backward, a digit the last one of a message's number.

    A column shows the last span that touches it, so that a message shorter than a column is still seen.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.origin_s = min(span.start_s for span in timeline.spans)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        tracks = list(dict.fromkeys(span.track for span in self.timeline.spans))
        shown = [COMPUTE, *(track for track in tracks if track != COMPUTE)][:MAX_TRACKS]
        gutter = min(MAX_LABEL, max(len(plain(track)) for track in shown))
        width = max(10, min(options.max_width, MAX_WIDTH) - gutter - 2)
        lines = self.lines(width)
        for track in shown:
            yield Text(f"{plain(track)[:gutter]:<{gutter}}  {lines[track]}", no_wrap=True)
        yield Text(" " * (gutter + 2) + self._axis(width), no_wrap=True)
        yield Text("f forward, b backward, 0-9 a message (last digit of its number), . idle")
        if len(tracks) > len(shown):
            yield Text(f"and {len(tracks) - len(shown)} more tracks")

    def lines(self, width: int) -> dict[str, str]:
        """Each track in ``width`` characters."""
        rows: dict[str, list[str]] = {}
        message = 0
        for span in self.timeline.spans:
            if span.track == COMPUTE:
                mark = span.name[:1] if span.name.startswith(("forward", "backward")) else "#"
            else:
                mark, message = str(message % 10), message + 1
            row = rows.setdefault(span.track, [IDLE] * width)
            low, high = self._column(span.start_s, width), self._column(span.end_s, width)
            last = min(width, max(high, low + 1))
            row[min(low, width - 1) : last] = mark * (last - min(low, width - 1))
        return {track: "".join(row) for track, row in rows.items()}

    def _column(self, at_s: float, width: int) -> int:
        whole_s = self.timeline.iteration_s
        return int((at_s - self.origin_s) / whole_s * width) if whole_s > 0 else 0

    def _axis(self, width: int) -> str:
        left, right = seconds(self.origin_s), seconds(self.timeline.finish_s)
        zero = self._column(0.0, width)
        axis = f"{left}{right:>{max(1, width - len(left))}}"
        if self.origin_s < 0 and len(left) < zero < width - len(right) - 1:
            axis = axis[:zero] + "0" + axis[zero + 1 :]
        return axis
