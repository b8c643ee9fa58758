"""Pages of results in a real browser, where one is installed: nothing is cut, overlaps or is too faint to read.

One page holds all cases in frames of several widths, in light and in dark; a script in it measures what the browser
has laid out, so that one start of the browser is enough.
"""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.eval.retrieval.retrieval_runs import RetrievalSetting, TrialScore
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.pictures.html_page import html_page
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.runs.comparison import Comparison
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.run import Run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = [(2, 2), (4, 3), (10, 8)]  # methods and lengths
WIDTHS = [1280, 768, 390]
NAMES = ["yarn", "an-extension-from-a-plug-in-of-somebody-else", "rerope", "WWWWWWWWMMMMMMMM", "位置の補間法", "ntk"]
FACTORS = [8.0, 4.0]

MEASURE = """
function boxes(node) { const range = document.createRange(); range.selectNodeContents(node);
  return [...range.getClientRects()].filter(box => box.width > 0); }
function inside(box, outer, by) { return box.left >= outer.left - by && box.right <= outer.right + by &&
  box.top >= outer.top - by && box.bottom <= outer.bottom + by; }
function touch(a, b) { return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1.5 &&
  b.top < a.bottom - 1.5; }
function shade(colour) { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; }
function shown(node) { return node.getClientRects().length > 0; }
function problems(view) {
  const page = view.document, found = [], say = (what, node) => found.push(`${what}: ${node.textContent.slice(0, 60)}`);
  const all = selector => [...page.querySelectorAll(selector)].filter(shown);
  if (page.scrollingElement.scrollWidth > view.innerWidth) found.push("wider than the window");
  const window_ = {left: 0, right: view.innerWidth, top: -1e6, bottom: 1e6};
  for (const node of all("body :not(.scrolls *)"))
    if (!inside(node.getBoundingClientRect(), window_, 1)) say("outside", node);
  if (view.innerWidth === 1280)
    for (const table of all("table")) if (view.getComputedStyle(table).display !== "table") say("blocks", table);
  for (const cell of all("th, td")) {
    const outer = cell.getBoundingClientRect();
    if (cell.scrollWidth > cell.clientWidth + 1 || !boxes(cell).every(box => inside(box, outer, 1))) say("cut", cell);
  }
  for (const svg of all("svg")) {
    const texts = [...svg.querySelectorAll("text")].map(node => [node, node.getBoundingClientRect()]);
    texts.forEach(([node, box], at) => {
      if (!inside(box, svg.getBoundingClientRect(), 0.5)) say("cut", node);
      for (const [other, there] of texts.slice(at + 1)) if (touch(box, there)) say(`on ${other.textContent}`, node);
      for (const mark of svg.querySelectorAll("path[class]"))
        if (touch(box, mark.getBoundingClientRect())) say("on a marker", node);
    });
    for (const curve of svg.querySelectorAll("path[stroke-width]")) {
      const matrix = curve.getScreenCTM(), length = curve.getTotalLength();
      for (let step = 0; step <= 40; step++) {
        const {x, y} = curve.getPointAtLength(length * step / 40).matrixTransform(matrix);
        const point = {left: x - 1.5, right: x + 1.5, top: y - 2, bottom: y + 2};
        for (const [node, box] of texts) if (touch(point, box)) say("on a curve", node);
      }
    }
  }
  const probe = page.body.appendChild(page.createElement("p"));
  probe.style.backgroundColor = "Canvas";
  const ground = shade(view.getComputedStyle(probe).backgroundColor);
  probe.remove();
  for (const node of all("body *")) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.data.trim())) continue;
    const style = view.getComputedStyle(node), ink = shade(node.matches("svg *") ? style.fill : style.color);
    if ((Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) < 4.5) say("faint", node);
  }
  return [...new Set(found)];
}
onload = () => {
  const result = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    page.querySelectorAll("details").forEach(node => node.open = true);
    for (const scheme of ["light", "dark"]) {
      page.documentElement.style.colorScheme = scheme;
      result[`${frame.title} ${scheme}`] = problems(frame.contentWindow);
    }
  }
  document.documentElement.textContent = JSON.stringify(result);
};
"""


def methods(count: int) -> list[dict[str, Any] | None]:
    every = ({"method": name, "factor": factor} for factor in FACTORS for name in NAMES)
    return [None, *islice(every, count - 1)]


def run_of(kind: str, folder: Path, results: list[Any]) -> Run[Any]:
    basis: dict[str, Any] = {"rotary": Rotary(16, 10000.0, 256).to_dict(), "layers": None, "below": []}
    settings = {
        **{"kind": kind, "model": "a-model", "data": "a folder of texts/*.txt", "dtype": "float32", "device": "cpu"},
        **{"loaded": None, "context_length": 256, "over": "own", "weights": "w", "basis": basis, "parameters": 7},
        **{"versions": {"torch": "2"}, "items": [f"document {i}" for i in range(9)], "digest": "0123456789" * 30},
    }
    return Run(folder, settings, results, run_kind(kind))


def losses(folder: Path, count: int, lengths: int) -> Run[Any]:
    """Lines that cross and end close together, and one that ends far away."""
    kind, setting = run_kind("perplexity"), Setting("matched", 5, 256, False, 0)
    results = []
    for nth, method in enumerate(methods(count)):
        for step in range(lengths):
            loss = 0.7 + (step if method is None else 0.05 * math.sin(nth + step))
            documents = [DocumentLoss(f"d{i}", 10 * (loss + 0.01 * (i * nth % 5)), 10, 12, 1) for i in range(9)]
            results.append(kind.result(method, setting, (256 * 2**step,), documents, [Cost()] * 9))
    return run_of("perplexity", folder, results)


def answers(folder: Path, count: int, lengths: int) -> Run[Any]:
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    scores = [TrialScore(i < 9, 2.0, 10.25) for i in range(10)]
    results = [
        kind.result(method, setting, (256 * 2**step, depth), scores, [Cost()])
        for method in methods(count)
        for step in range(lengths)
        for depth in (0.0, 1.0)
    ]
    return run_of("passkey", folder, results)


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and pages of one run and of two, for each size."""
    for count, lengths in SIZES:
        size = f"{count} x {lengths}"
        runs = losses(folder, count, lengths), answers(folder, count, lengths)
        for run in runs:
            write_files(run)
            yield f"{run.kind.name} {size}", (folder / "report.html").read_text("utf-8")
        yield f"comparison {size}", Comparison(runs).write_page(folder / "comparison.html").read_text("utf-8")


def test_a_table_stays_a_table_where_it_fits(tmp_path: Path) -> None:
    """Ten methods at eight lengths in a window of 62 rem; with intervals, of values or differences, they scroll."""
    run = losses(tmp_path, 10, 8)
    write_files(run)
    page = (tmp_path / "report.html").read_text("utf-8")
    before = re.findall(r'(.*)<table class="from-([0-9]+)"', page)
    assert [('class="scrolls"' in start, width) for start, width in before] == [
        *((False, "62"), (True, "62"), (True, "62"))
    ]


FAULTY = """<table style="display: block"><tr>
<td style="display: block; width: 20px; white-space: nowrap">wider than that</td></tr></table>
<svg viewBox="0 0 100 50" width="100"><text x="10" y="20">one</text><text x="12" y="20">two</text>
<text x="90" y="40">cut at the end</text></svg><p style="color: #888">faint</p><div style="width: 3000px">wide</div>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
def test_pages_are_whole_at_every_width_in_light_and_dark(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    cases = dict(pages(folder)) | {"faulty": html_page("Title", "Summary.", FAULTY)}
    frames = [
        f'<iframe title="{name} {width}" style="width: {width}px; height: 900px" srcdoc="{html.escape(page)}"></iframe>'
        for name, page in cases.items()
        for width in WIDTHS
    ]
    outer = tmp_path / "outer.html"
    outer.write_text(f'<!doctype html><meta charset="utf-8"><script>{MEASURE}</script>{"".join(frames)}', "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [str(BROWSER), *options, "--virtual-time-budget=20000", outer.as_uri()]
    ran = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=True)
    problems: dict[str, list[str]] = json.loads(html.unescape(re.sub("<.*?>", "", ran.stdout)))
    assert len(problems) == 2 * len(frames)
    for case, faults in problems.items():
        if case.startswith("faulty"):  # the script sees each kind of fault
            kinds = {fault.partition(":")[0] for fault in faults}
            assert {"wider than the window", "outside", "cut", "on two", "faint"} <= kinds, case
            assert ("blocks" in kinds) is (" 1280 " in case)
            assert "cut: wider than that" in faults
            assert "cut: cut at the end" in faults
        else:
            assert faults == [], case
