"""Turn runs into tables, curves and one page."""

from softmoe.report.runs import RunRecord, differences, refitted_heads, summary_table, table_text, write_report
from softmoe.train.folder import load_run

__all__ = ["RunRecord", "differences", "load_run", "refitted_heads", "summary_table", "table_text", "write_report"]
