"""Charts of rates, drawn by matplotlib: the extra `report`.

Readable in black and white and by colour-blind readers: series differ in lightness, hatch, marker
and dash, not in hue alone (colours: Okabe and Ito 2008). Axes start at zero and have units.
"""

from collections.abc import Callable, Sequence
import io
import re
from typing import Any
import zlib

from benchmarks import published
from benchmarks.page.blocks import Figure, Panel
from benchmarks.page.rates import SYNTHETIC, Platform
from hpm.errors import UsageError

__all__ = [
  'COLOURS',
  'figure_svg',
  'line',
  'panel_svg',
  'real_bars',
  'real_shares',
  'require',
  'scaling',
  'throughput',
]

# From dark to light, so that they differ in print too.
COLOURS = ('#0072B2', '#E69F00', '#009E73', '#56B4E9', '#D55E00')
_HATCHES = ('', '///', '\\\\\\', 'xx', '--')
_MARKERS = ('o', 's', '^', 'D', 'v')
_DASHES = ('-', '--', '-.', ':', (0, (6, 1, 1, 1, 1, 1)))
_LEGEND: dict[str, Any] = {
  'loc': 'upper left',
  'fontsize': 7.5,
  'frameon': False,
  'handlelength': 1.6,
  'handletextpad': 0.5,
  'columnspacing': 0.9,
}
_HEIGHT = 2.5  # inches, of a panel
_PAGE = 9.6  # inches, its width


def require() -> None:
  """UsageError with the install command if matplotlib is missing."""
  try:
    import matplotlib  # noqa: F401
  except ImportError:
    raise UsageError(
      "charts need matplotlib: pip install '.[report]' in the checkout, or --charts=false"
    ) from None


def panel_svg(panel: Panel, width: float) -> str:
  """One panel as SVG to stand inside HTML."""
  svg = _svg([panel], width, 1)
  svg = svg[svg.index('<svg') :]
  label = panel.title.replace('&', '&amp;').replace('"', '&quot;')
  return svg.replace('<svg', f'<svg role="img" aria-label="{label}"', 1)


def figure_svg(figure: Figure) -> str:
  """All panels of a figure as one SVG file, as many in a row as a page has room for."""
  return _svg(figure.panels, figure.width, int(_PAGE // figure.width))


def throughput(name: str, platforms: Sequence[Platform]) -> Figure:
  """Bars of images a second with synthetic data, a panel a model, over the number of devices."""
  return Figure(
    f'{name}_throughput',
    f'Images a second in training with synthetic data, {_names(platforms)}, by model and number of '
    f'{platforms[0].device}s. Each panel has a scale of its own.',
    [
      Panel(_title(model), _bars(model, [(p, SYNTHETIC, p.short) for p in platforms]))
      for model in platforms[0].models
    ],
  )


def real_bars(platform: Platform) -> Figure:
  """Bars of images a second with synthetic and with real data, a panel a model."""
  kinds = [SYNTHETIC, *platform.real_data]
  return Figure(
    f'{platform.name}_real',
    f'Images a second in training with synthetic and with real data, {platform.title}, by model '
    f'and number of {platform.device}s. A missing bar was not measured.',
    [
      Panel(_title(model), _bars(model, [(platform, kind, kind) for kind in kinds]))
      for model in platform.models
    ],
  )


def scaling(platforms: Sequence[Platform]) -> Figure:
  """Lines of the rate over that of one device, a panel a platform, with the ideal."""
  return Figure(
    'scaling',
    'How many times as fast as one device, with synthetic data, over the number of devices. The '
    'grey line is the ideal, as many times as there are devices.',
    [Panel(platform.short, _lines(platform)) for platform in platforms],
    width=3.15,
  )


def real_shares(platforms: Sequence[Platform]) -> Figure:
  """Bars of the rate with real data as a share of that with synthetic data."""
  return Figure(
    'real_share',
    'Rate with real data as a share of that with synthetic data, by model and number of devices. '
    '100 % (the line): the input keeps up. A missing bar was not published or not measured.',
    [
      Panel(f'{platform.short}, {name}', _shares(platform, name))
      for platform in platforms
      for name in platform.real_data
    ],
    width=4.4,
  )


def line(number: int) -> dict[str, Any]:
  """How the line of a number looks, for `Axes.plot`."""
  return {
    'color': COLOURS[number % 5],
    'marker': _MARKERS[number % 5],
    'linestyle': _DASHES[number % 5],
    'linewidth': 1.3,
    'markersize': 4.5,
    'zorder': 2,
  }


def _bars(model: str, series: Sequence[tuple[Platform, str, str]]) -> Callable[[Any], None]:
  def draw(axes: Any) -> None:
    counts = sorted({n for platform, _, _ in series for n in platform.counts})
    width = 0.8 / len(series)
    highest = 0.0
    for number, (platform, data, label) in enumerate(series):
      points = [(i, platform.rate(model, n, data)) for i, n in enumerate(counts)]
      points = [(i, rate) for i, rate in points if rate is not None and rate.value is not None]
      places = [i + (number - (len(series) - 1) / 2) * width for i, _ in points]
      values = [rate.value for _, rate in points]
      highest = max([highest, *values])
      bars = axes.bar(places, values, width * 0.94, label=label, **_fill(number))
      if len(series) == 1 or len(counts) * len(series) <= 6:
        axes.bar_label(bars, [_rate(value) for value in values], padding=2, fontsize=7.5)
    axes.set_xticks(range(len(counts)), [str(n) for n in counts])
    axes.set_xlabel(f'{series[0][0].device}s')
    axes.set_ylabel('images/s')
    axes.set_ylim(0, highest * (1.35 if len(series) > 1 else 1.15) or 1)
    if len(series) > 1:
      axes.legend(ncols=min(len(series), 3), **_LEGEND)

  return draw


def _lines(platform: Platform) -> Callable[[Any], None]:
  def draw(axes: Any) -> None:
    most = max(platform.counts)
    axes.plot([0, most], [0, most], color='0.6', linewidth=1.2, label='ideal', zorder=1)
    for number, model in enumerate(platform.models):
      points = [(n, platform.scaling(model, n)) for n in platform.counts]
      points = [(n, value * n) for n, value in points if value is not None]
      axes.plot(
        *zip(*points) if points else ((), ()),
        label=_title(model),
        **line(number),
      )
    axes.set_xticks(platform.counts)
    axes.set_xlim(0, most * 1.06)
    axes.set_ylim(0, most * 1.06)
    axes.set_xlabel(f'{platform.device}s')
    axes.set_ylabel('times one device')
    axes.legend(**_LEGEND)

  return draw


def _shares(platform: Platform, data: str) -> Callable[[Any], None]:
  def draw(axes: Any) -> None:
    counts, models = platform.counts, platform.models
    width = 0.84 / len(counts)
    for number, count in enumerate(counts):
      points = [(i, platform.real_share(model, count, data)) for i, model in enumerate(models)]
      points = [(i, 100 * share) for i, share in points if share is not None]
      places = [i + (number - (len(counts) - 1) / 2) * width for i, _ in points]
      plural = platform.device if count == 1 else f'{platform.device}s'
      label = f'{count} {plural}'
      axes.bar(places, [v for _, v in points], width * 0.92, label=label, **_fill(number))
    axes.axhline(100, color='0.2', linewidth=1)
    axes.set_xticks(range(len(models)), [_title(model) for model in models], fontsize=7.5)
    axes.set_ylabel('% of synthetic')
    top = max((bar.get_height() for bar in axes.patches), default=100)
    axes.set_ylim(0, max(100, top) * 1.3)
    axes.legend(ncols=4, **_LEGEND)

  return draw


def _fill(number: int) -> dict[str, Any]:
  return {
    'color': COLOURS[number % 5],
    'hatch': _HATCHES[number % 5],
    'edgecolor': 'white' if number else COLOURS[0],
    'linewidth': 0,
  }


def _svg(panels: Sequence[Panel], width: float, columns: int) -> str:
  import matplotlib
  from matplotlib.backends.backend_svg import FigureCanvasSVG
  from matplotlib.figure import Figure as Canvas

  # Text stays text, and the same page is the same file.
  style = {
    'svg.fonttype': 'none',
    'svg.hashsalt': 'hpm',
    'hatch.linewidth': 0.8,
    'font.family': 'sans-serif',
    'font.sans-serif': ['DejaVu Sans'],
    'font.size': 8.5,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.titlesize': 9.5,
    'axes.titleweight': 'bold',
  }
  with matplotlib.rc_context(style):
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    canvas = Canvas(figsize=(width * columns, _HEIGHT * rows), layout='constrained')
    FigureCanvasSVG(canvas)
    axes = canvas.subplots(rows, columns, squeeze=False)
    for number, place in enumerate(axes.flat):
      if number >= len(panels):
        place.set_axis_off()
        continue
      place.yaxis.grid(True, color='0.88', linewidth=0.7)
      place.set_axisbelow(True)
      panels[number].draw(place)
      place.set_title(panels[number].title, loc='left')
    file = io.StringIO()
    canvas.savefig(file, format='svg', metadata={'Date': None})
  # Fonts that a browser has, and ids that don't meet those of another panel on the page.
  text = file.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, Arial")
  salt = f'c{zlib.crc32(text.encode()):08x}'
  return re.sub(r'(\bid="|href="#|url\(#)', rf'\g<1>{salt}-', text)


def _title(model: str) -> str:
  return published.MODELS.get(model, model)


def _names(platforms: Sequence[Platform]) -> str:
  return ' and '.join(platform.title for platform in platforms)


def _rate(value: float) -> str:
  return f'{value:.0f}' if value >= 100 else f'{value:.1f}'
