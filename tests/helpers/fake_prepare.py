"""Fake preparation: writes plan.json, or leaves with the code that the knobs ask for."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.helpers.fake_run import SPEC, knobs, rest


def main() -> None:
    """Prepare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    for number in range(3):
        print(f"preparing {number}", flush=True)
    rest(knobs().get("prepare_s", 0))
    if code := knobs().get("prepare_exit"):
        print("data.sources: /does/not/exist: no such file", file=sys.stderr)
        sys.exit(code)
    (run_dir / "plan.json").write_text(json.dumps({"slot_spec": SPEC.to_json(), "num_packs": 1000}))


if __name__ == "__main__":
    main()
