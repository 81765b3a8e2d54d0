"""The profile leaves a table and a trace."""

import json

from titans_pt.benchmarks.profile import profile


def test_a_profile(tmp_path):
    profile(tmp_path, once=False)
    assert (
        "Scan" in (tmp_path / "profile.txt").read_text() or "titans::memory" in (tmp_path / "profile.txt").read_text()
    )
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
