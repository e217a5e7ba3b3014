"""A run as one HTML file that opens offline: no script, no network.

    write_report(Path("runs/digits"))                # runs/digits/report.html

contents.py   the run's files, and measurements of its model: animation, bound, bits by level
charts.py     curves as SVG
page.py       the document
"""

from bsi.report.page import write_report

__all__ = ["write_report"]
