"""The page: its sections, its tables, and charts that can be trusted and read."""

import dataclasses
import re

import pytest

from benchmarks import published
from benchmarks.page import blocks, charts, content, rates

REMARK = 'A quick run: fewer steps.'
FACTS = {
  'gpus': [],
  'cpu': 'Some CPU',
  'cores': 2,
  'memory_mib': 24000,
  'git_revision': 'abcdef0123456',
  'system': 'Linux',
  'tensorflow': '2.21.0',
  'onednn': 'on',
  'python': '3.11',
}
PUBLISHED = rates.published_platforms()


def this_machine(real=('photos',)):
  found = []
  for place, model in enumerate(published.MODELS):
    for data in ('synthetic', *real):
      for count in (1, 2):
        for batch in (4, 2):
          value = (place + 1) * count * (0.9 if data == 'synthetic' else 0.6)
          found.append(rates.Rate(model, count, batch, data, value, value - 0.1, value + 0.1, 3))
  found[0] = rates.Rate(*found[0][:4], None, num_runs=0, note='took longer than 120 s')
  runs = [{'started_at': '2026-12-01T00:00:00', 'machine': FACTS, 'other_load_cores': 0.5}]
  configured = dict.fromkeys(published.MODELS, ('parameter_server', 'cpu'))
  return rates.measured(found, runs, configured, 'sgd', {'photos': '8 files'}, REMARK)


@pytest.fixture(scope='module')
def page():
  return content.page(this_machine(), PUBLISHED, ['It has no GPU.'], 'python -m benchmarks.suite')


def drawn(panel):
  from matplotlib.figure import Figure

  axes = Figure().subplots()
  panel.draw(axes)
  return axes


def test_it_has_the_sections_of_the_published_page(page):
  titles = [block.text for block in page if isinstance(block, blocks.Heading)]
  wanted = [
    *('Overview', 'Results for each platform', 'Environment', 'Options', 'Configuration of each'),
    *('Training with synthetic data', 'Training with real data', 'Other results'),
    *('Distributed training', 'Methodology'),
  ]
  places = [
    next(i for i, title in enumerate(titles) if title.startswith(start)) for start in wanted
  ]
  assert places == sorted(places)
  for platform in PUBLISHED:
    assert any(platform.title.lower() == title.lower() for title in titles)
  assert any(title.startswith('This machine (Some CPU)') for title in titles)


def test_every_published_figure_stands_on_it(page):
  text = blocks.markdown(page, lambda figure: None, 'note')
  for platform in PUBLISHED:
    start = text.lower().index(f'### {platform.title}'.lower())
    end = text.find('\n### ', start + 1)
    for rate in platform.rates:
      if rate.value is not None:
        value = f'{rate.value:.0f}' if rate.value >= 100 else f'{rate.value:.1f}'
        assert f'| {value} ' in text[start:end], rate
      else:
        assert f'(1) {rate.note}.' in text[start:end]
  assert 'TensorFlow Benchmarks page, May 2017' in text


def test_each_table_of_a_quick_run_says_so(page):
  whole = list(content.platform_sections(this_machine()))
  tables = [
    i
    for i, block in enumerate(whole)
    if isinstance(block, blocks.Table) and block.caption.startswith('Images a second')
  ]
  assert len(tables) == 4
  for place in tables:
    after = whole[place + 1 : place + 3]
    assert blocks.Text(REMARK) in after
  notes = [block.text for block in whole if isinstance(block, blocks.Text)]
  assert '(1) took longer than 120 s.' in notes


def test_this_machine_stands_beside_the_published_ones(page):
  tables = [block for block in page if isinstance(block, blocks.Table)]
  assert tables[0].columns[1:] == ('this machine', *(platform.short for platform in PUBLISHED))
  rows = {row[0]: row[1:] for row in tables[0].rows}
  assert rows['ResNet-50'] == ['3.6 (2)', '1734 (8)', '387 (8)', '384 (8)', '2744 (64)']
  each = {row[0]: row[1:] for row in tables[1].rows}
  assert each['ResNet-50'][:2] == ['1.8, 100%', '217, 99%']
  assert each['AlexNet'][-1] == '–'


def test_work_a_cpu_second_stands_on_it_where_it_is_known():
  rate = rates.Rate('resnet50', 1, 4, 'synthetic', 8.0, 7.0, 9.0, 2, '', 5.25)
  this = dataclasses.replace(this_machine(), rates=[rate])
  (table,) = [
    block
    for block in content.platform_sections(this)
    if isinstance(block, blocks.Table) and 'CPU second' in block.caption
  ]
  assert table.rows == [['synthetic, 1', '5.25']]
  assert 'CPU second' not in str(content.platform_sections(PUBLISHED[0]))


def test_shares_and_scaling_need_both_of_their_figures():
  this = this_machine()
  assert this.scaling('resnet50', 2) == pytest.approx(1.0)
  assert this.scaling('inception3', 2) is None  # its single device has no figure
  assert this.real_share('resnet50', 2, 'photos') == pytest.approx(0.6 / 0.9)
  assert this.real_share('inception3', 1, 'photos') is None
  p100 = PUBLISHED[0]
  assert p100.real_share('alexnet', 8, 'imagenet') is None
  assert p100.real_share('alexnet', 4, 'imagenet') == pytest.approx(7105 / 10509)


def test_html_is_one_file_that_loads_nothing(page):
  html = blocks.html(page, charts.panel_svg)
  assert not re.search(r'<(script|link|img|iframe)|@import|url\((?!#)|src=', html)
  assert html.count('<svg role="img" aria-label="') == sum(
    len(block.panels) for block in page if isinstance(block, blocks.Figure)
  )
  assert 'name="viewport"' in html and html.startswith('<!DOCTYPE html>')
  ids = re.findall(r'\bid="([^"]+)"', html)
  targets = re.findall(r'(?:href="#|url\(#)([^")]+)', html)
  assert targets and set(targets) <= set(ids)


def test_markdown_and_html_escape_what_they_show():
  shown = [blocks.Table('', ('a|b', 'c'), [('x<y', '`z`')]), blocks.Text('a [b](c) & d')]
  assert 'a\\|b' in blocks.markdown(shown, lambda figure: None, '')
  html = blocks.html(shown, lambda panel, width: None)
  assert 'x&lt;y' in html and '<code>z</code>' in html
  assert 'a <a href="c">b</a> &amp; d' in html


@pytest.mark.parametrize('name', ['throughput', 'real', 'scaling', 'real_share'])
def test_axes_start_at_zero_and_have_units(page, name):
  figures = [block for block in page if isinstance(block, blocks.Figure)]
  panels = [panel for figure in figures if figure.name.endswith(name) for panel in figure.panels]
  assert panels
  for panel in panels:
    axes = drawn(panel)
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylabel() in ('images/s', 'times one device', '% of synthetic')
    if name != 'real_share':
      assert axes.get_xlabel() in ('GPUs', 'CPU devices')


def test_bars_are_the_figures_and_a_missing_one_has_none():
  figure = charts.throughput('p100', [PUBLISHED[0]])
  (panel,) = [panel for panel in figure.panels if panel.title == 'ResNet-50']
  assert [bar.get_height() for bar in drawn(panel).patches] == [219, 422, 852, 1734]
  figure = charts.real_bars(PUBLISHED[0])
  (panel,) = [panel for panel in figure.panels if panel.title == 'AlexNet']
  heights = [bar.get_height() for bar in drawn(panel).patches]
  assert heights == [2987, 5658, 10509, 17822, 2890, 4448, 7105]


def test_scaling_is_drawn_against_the_ideal():
  (panel,) = charts.scaling([PUBLISHED[0]]).panels
  ideal, *lines = drawn(panel).get_lines()
  assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [0, 8]
  assert len(lines) == 5
  assert list(lines[1].get_ydata()) == pytest.approx([1, 422 / 219, 852 / 219, 1734 / 219])


def test_series_differ_without_their_colours():
  axes = drawn(charts.real_bars(this_machine(('photos', 'drawings'))).panels[1])
  hatches = {bar.get_hatch() for bar in axes.patches}
  assert len(hatches) == 3
  lines = drawn(charts.scaling([PUBLISHED[0]]).panels[0]).get_lines()[1:]
  assert len({line.get_marker() for line in lines}) == 5
  grey = [sum(a * b for a, b in zip(_rgb(colour), (0.30, 0.59, 0.11))) for colour in charts.COLOURS]
  first, second = grey[:2]
  assert abs(first - second) > 0.25  # the two that stand side by side most


def _rgb(colour):
  return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def test_the_same_page_is_the_same_file():
  figure = charts.throughput('p100', [PUBLISHED[0]])
  assert charts.figure_svg(figure) == charts.figure_svg(figure)
