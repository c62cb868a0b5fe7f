"""A plan as one self-contained HTML page."""

from .page import report_html as report_html
from .page import write_report as write_report
