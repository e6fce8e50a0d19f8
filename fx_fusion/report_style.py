"""The style and the script of a saved report's page."""

from __future__ import annotations

from typing import Final

from fx_fusion.report_svg import COLOURS, style

#: Fill and border of each kind of box on a dark page.
_DARK: Final = {
    "input": ("#24292f", "#6e7681"),
    "collective": ("#4a3510", "#d29922"),
    "pointwise": ("#17325c", "#6ea8fe"),
    "fused": ("#12402a", "#3fb950"),
}


def _colours(table: dict[str, tuple[str, str]]) -> str:
    return " ".join(
        f"--{kind}: {fill}; --{kind}-border: {border};"
        for kind, (fill, border) in table.items()
    )


CSS: Final = f"""
:root {{ color-scheme: light dark; --page: #ffffff; --card: #f6f8fa; --line: #d0d7de;
  --ink: #1f2328; --muted: #57606a; --arrow: #6b7280; --link: #0550ae; --good: #116329;
  --bad: #9a3412; {_colours(COLOURS)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #0d1117; --card: #161b22;
  --line: #30363d; --ink: #e6edf3; --muted: #9da7b3; --arrow: #9da7b3; --link: #79b8ff;
  --good: #56d364; --bad: #ffa657; {_colours(_DARK)} }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1rem; max-width: 80rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 ui-sans-serif, system-ui, "DejaVu Sans", sans-serif }}
h1 {{ font-size: 1.5rem; margin: .5rem 0 }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .5rem }}
a {{ color: var(--link) }}
code, .path {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .875em;
  overflow-wrap: anywhere }}
:focus-visible {{ outline: 3px solid var(--link); outline-offset: 2px }}
.muted {{ color: var(--muted) }}
.note {{ border-left: 4px solid var(--collective-border); padding: .25rem .75rem;
  background: var(--card); overflow-wrap: anywhere }}
.good {{ color: var(--good); font-weight: 600; white-space: nowrap }}
.bad {{ color: var(--bad); font-weight: 600; white-space: nowrap }}
.filters {{ display: flex; flex-wrap: wrap; gap: .75rem 1rem; align-items: end; margin: .5rem 0 }}
.filters label {{ display: flex; flex-direction: column; font-size: .875rem;
  color: var(--muted) }}
.filters input, .filters select {{ font: inherit; color: var(--ink); background: var(--page);
  border: 1px solid var(--muted); border-radius: 6px; padding: .35rem .5rem }}
.filters input {{ width: min(26rem, 88vw) }}
.scroll {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 8px }}
.scroll.long {{ max-height: 36rem; overflow-y: auto }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem;
  border-bottom: 1px solid var(--line) }}
thead th {{ position: sticky; top: 0; background: var(--card); white-space: nowrap }}
tbody tr:last-child td {{ border-bottom: 0 }}
tr[hidden] {{ display: none }}
details {{ border: 1px solid var(--line); border-radius: 8px; margin: .75rem 0;
  background: var(--card) }}
summary {{ cursor: pointer; padding: .6rem .9rem; overflow-wrap: anywhere }}
.inside {{ padding: 0 .9rem .9rem }}
dl {{ display: grid; grid-template-columns: 6.5rem 1fr; gap: .2rem .75rem; margin: .25rem 0 }}
dt {{ color: var(--muted) }}
dd {{ margin: 0; overflow-wrap: anywhere }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: start;
  margin-top: .75rem }}
.pictures svg {{ max-width: 100%; height: auto }}
.legend {{ display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .875rem;
  color: var(--muted); padding: 0; list-style: none }}
.legend svg {{ vertical-align: -2px; margin-right: .4rem }}
.tip {{ position: absolute; width: 0; height: 0 }}
@media (max-width: 46rem) {{
  .scroll.long {{ max-height: 26rem }}
  thead {{ display: none }}
  tbody tr {{ display: block; padding: .4rem 0; border-bottom: 1px solid var(--line) }}
  td {{ display: grid; grid-template-columns: 5.5rem 1fr; gap: .5rem; border: 0;
    padding: .1rem .6rem; overflow-wrap: anywhere }}
  td::before {{ content: attr(data-label); color: var(--muted) }}
  dl {{ grid-template-columns: 1fr }}
  dt {{ margin-top: .3rem }}
}}
@media print {{ .filters {{ display: none }} .scroll.long {{ max-height: none }} }}
{style(variables=True)}
"""

SCRIPT: Final = """
"use strict";
const search = document.getElementById("search");
const outcome = document.getElementById("outcome");
const shown = document.getElementById("shown");
const rows = Array.from(document.querySelectorAll("#sites tbody tr"));
const texts = rows.map((row) => row.textContent.toLowerCase());
function filter() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  rows.forEach((row, index) => {
    const fits = words.every((word) => texts[index].includes(word)) &&
      (outcome.value === "" || row.dataset.outcome === outcome.value);
    row.hidden = !fits;
    if (fits) count += 1;
  });
  shown.textContent = count + " of " + rows.length + (rows.length === 1 ? " site" : " sites");
}
function open_target() {
  const target = document.getElementById(location.hash.slice(1));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.querySelector("summary").focus();
  }
}
if (search) {
  search.addEventListener("input", filter);
  outcome.addEventListener("change", filter);
  filter();
}
window.addEventListener("hashchange", open_target);
open_target();
"""
