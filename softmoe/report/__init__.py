"""Turn runs into tables, curves and one page."""

from softmoe.report.page import write_report
from softmoe.report.runs import RunRecord, load_run
from softmoe.report.summary import differences, summary_table

__all__ = ["RunRecord", "differences", "load_run", "summary_table", "write_report"]
