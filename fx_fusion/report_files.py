"""Write a report into a folder. Standard library alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fx_fusion.errors import SaveError
from fx_fusion.report_page import graphs_text, report_page
from fx_fusion.report_repro import repro_text

if TYPE_CHECKING:
    from fx_fusion.report import FusionReport


def save_report(report: FusionReport, folder: Path, *, overwrite: bool = False) -> Path:
    """Write the files that `FusionReport.save` describes; returns the path of index.html.

    Raises:
        SaveError: The folder holds files and `overwrite` is False, or it can't be written.
    """
    files = {
        "report.json": report.to_json() + "\n",
        "before.txt": graphs_text(report.graphs, after=False),
        "after.txt": graphs_text(report.graphs, after=True),
        "repro.py": repro_text(report),
        "index.html": report_page(report),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite and any(folder.iterdir()):
            raise SaveError(
                f"save({str(folder)!r}): the folder isn't empty. Name a new or an empty one, or"
                " pass overwrite=True to replace the report's files in it; others stay."
            )
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    except SaveError:
        raise
    except OSError as error:
        raise SaveError(
            f"save({str(folder)!r}): can't write there ({error.strerror or error}). Name a"
            " folder that can be made and written."
        ) from error
    return folder / "index.html"
