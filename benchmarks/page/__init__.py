"""The benchmark page: tables and charts of this machine and of published ones.

`rates` has the figures of a platform in one form, published or measured; `content` puts them into
sections of the blocks of `blocks`, which become Markdown, HTML or lines on a terminal; `charts`
draws. None of them measures: that is `benchmarks.suite`.
"""
