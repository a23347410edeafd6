"""Turn runs into tables, curves and one page."""

from softmoe.report.runs import RunRecord, differences, load_run, summary_table, table_text, write_report

__all__ = ["RunRecord", "differences", "load_run", "summary_table", "table_text", "write_report"]
