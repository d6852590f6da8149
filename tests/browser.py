"""A headless Chromium that shows a page from a file: what it complains of, and what it answers to a script.

Debian and Ubuntu have it as the package `chromium`. It gets a profile of its own, and no way to any host.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from limits import HUNG_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER = """
<script>
window.problems = [];
const place = (element) => element.src || element.href;
addEventListener("error", (event) => problems.push(event.message ?? `not loaded: ${place(event.target)}`), true);
addEventListener("securitypolicyviolation", (event) => problems.push(`refused: ${event.blockedURI}`));
</script>
"""
ASK = """
<script>addEventListener("load", () => {
  const drawn = (element) => { const box = element.getBoundingClientRect(); return box.width > 20 || box.height > 20; };
  let answer;
  try { answer = (%s)(drawn); } catch (error) { answer = {error: String(error.stack)}; }
  document.body.innerHTML = "<pre id=answer></pre>";
  document.getElementById("answer").textContent = JSON.stringify({problems, answer});
});</script>
"""


def ask(page: Path, script: str, folder: Path) -> Any:
    """What `script`, the text of a function, returns in the loaded page; it gets a function that says whether an
    element covers something of the screen. Raises AssertionError where the console has a message or an exception."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    copy = page.with_name(f"asked-{page.name}")  # beside it, so that what it links to is found
    copy.write_text(page.read_text().replace("<head>", f"<head>{ANSWER}", 1) + ASK % script)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,2000"]
    options += [f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    command = [browser, *options, "--enable-logging=stderr", "--dump-dom", f"file://{copy}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S)
    finally:
        copy.unlink()
    complaints = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    answer = re.search(r'<pre id="answer">(.*?)</pre>', result.stdout, re.DOTALL)
    found = json.loads(unescape(answer[1])) if answer else {"problems": ["no answer"]}
    if complaints or found["problems"]:
        raise AssertionError("\n".join([*complaints, *found["problems"]]))
    return found["answer"]
