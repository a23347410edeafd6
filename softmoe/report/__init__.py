"""Turn runs into tables, curves and one page."""

from softmoe.report.page import differences, summary_table, table_text, write_report
from softmoe.report.runs import RunRecord, load_run

__all__ = ["RunRecord", "differences", "load_run", "summary_table", "table_text", "write_report"]
