"""The example in docs/concepts.md prints what the page says it prints."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/concepts.md"


def test_the_example_prints_what_the_page_says():
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    promised = re.search(r"It prints `([^`]+)`", text)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, str(PAGE), "exec"), {})
    assert printed.getvalue().strip() == promised
