"""The one command of the project: `python launch.py CONFIG` runs a configuration, subcommands look at or command a run.

Each subcommand is a few lines that call ops/, imported there so that `doctor` runs where something is missing. Nothing
here or there imports torch. Every error that a user can cause carries its exit code and is printed as its lines.
Exit codes: 0 done, 2 configuration (also options, and a run that is not there or not running), 3 data,
4 a process died, 5 resources (devices, memory, disk, packages, checkpoints), 130 interrupted (docs/operations.md).
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ops.supervisor import Modules

RESTART_LIMIT_S = 900.0
LACKING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM),
}
"""What the operating system says where the machine lacks something, or does not allow it: exit code 5."""


def main(arguments: Sequence[str] | None = None, modules: Modules | None = None) -> int:
    """Run the command line and return the exit code; one line on stderr for everything a user can cause."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] not in COMMANDS and words[0] not in ("-h", "--help"):
        if mistyped := _mistyped(words[0]):
            print(mistyped, file=sys.stderr)
            return 2
        words.insert(0, "run")
    parser, parsers = _parser()
    options, unknown = parser.parse_known_args(_one_value_each(words))
    if unknown:
        parsers[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    options.modules = modules
    try:
        return COMMANDS[options.command][0](options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, for example `| head`
        sys.stderr.close()
        return 0
    except Exception as error:
        code = getattr(error, "exit_code", 5 if isinstance(error, ImportError) else None)
        if code is None and isinstance(error, OSError) and error.errno in LACKING:
            print(f"{error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
            return 5
        if code is None:  # not an error that a user can cause: show where it comes from
            raise
        print(str(error), file=sys.stderr)
        return int(code)


def _mistyped(word: str) -> str:
    """What to say of a first word that can be neither a command nor a configuration; empty if it can."""
    if word.startswith("-") or word.endswith((".yaml", ".yml")) or Path(word).is_file():
        return ""
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    advice = f"did you mean '{near[0]}'?" if near else "'python launch.py --help' lists the commands"
    return f"{word}: neither a command nor a configuration file; {advice}"


def _one_value_each(words: Sequence[str]) -> list[str]:
    """Give every value of `--set a=1 b=2` a --set of its own; a word without `=` is none of them, but the run."""
    found: list[str] = []
    in_set = is_first = False
    for word in words:
        if word == "--set":
            in_set = is_first = True
            found.append(word)
        elif in_set and (is_first or ("=" in word and not word.startswith("-"))):
            found += [word] if is_first else ["--set", word]
            is_first = False
        else:
            in_set = word.startswith("--set=")
            found.append(word)
    return found


def _run(options: argparse.Namespace) -> int:
    from configs.load import load_config
    from ops.hosts import host_place
    from ops.run import run, run_folder

    overrides = list(options.set) + ([f"run.name={options.name}"] if options.name else [])
    config = load_config(options.config, overrides)
    where = host_place(options.nnodes, options.node_rank, options.rdzv, os.environ)
    if not options.detach:
        return run(config, options.modules, where)
    from ops.detach import detach

    print(detach(run_folder(config)))
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from configs.load import load_config
    from ops.run import run

    overrides = list(options.set) + ([f"run.name={options.name}"] if options.name else [])
    overrides += ["data.regenerate.enabled=true"] if options.regenerate else []
    return run(load_config(options.config, overrides), options.modules, prepare_only=True)


def _status(options: argparse.Namespace) -> int:
    from ops import commands

    values = commands.status(_found(options))
    print(commands.as_json(values) if options.json else "\n".join(commands.status_lines(values)))
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from ops.dashboard import dashboard

    dashboard(_found(options), options.once, options.json, options.svg)
    return 0


def _summary(options: argparse.Namespace) -> int:
    from ops.summary import show_again

    show_again(_found(options), options.svg)
    return 0


def _restart(options: argparse.Namespace) -> int:
    from ops import commands

    print("\n".join(commands.restart(_found(options), options.which, options.set, RESTART_LIMIT_S)))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from ops import commands

    print(commands.stop(_found(options)))
    return 0


def _pass_on(options: argparse.Namespace) -> int:
    from ops import commands

    reply = commands.command(_found(options), options.command, timeout_s=60)
    print("\n".join(commands.passed_on(reply, options.command)))
    return 0


def _set(options: argparse.Namespace) -> int:
    """`set key=value ... [RUN]`: a word without `=` is the run."""
    from configs.load import ConfigError
    from ops import commands

    names = [word for word in options.words if "=" not in word]
    options.run = names[0] if names else None
    settings = [word for word in options.words if "=" in word]
    if len(names) > 1 or not settings:
        raise ConfigError(["set: expected section.key=value ..., and at most one run"])
    print("\n".join(commands.passed_on(commands.command(_found(options), "set", timeout_s=60, set=settings), "set")))
    return 0


def _telemetry(options: argparse.Namespace) -> int:
    from configs.load import ConfigError
    from ops.exporters import Exporter, Prometheus, TensorBoard, WeightsAndBiases, export

    if not options.tensorboard and not options.wandb and options.prometheus is None:
        raise ConfigError(["telemetry: expected --tensorboard, --wandb PROJECT or --prometheus PORT, got none of them"])
    run_dir = _found(options)
    exporters: list[Exporter] = [TensorBoard(run_dir)] if options.tensorboard else []
    if options.wandb:
        exporters.append(WeightsAndBiases(run_dir, options.wandb))
    if options.prometheus is not None:
        exporters.append(prometheus := Prometheus(run_dir, options.prometheus))
        print(f"http://127.0.0.1:{prometheus.port}/metrics", flush=True)
    print(f"{export(run_dir, exporters)} lines of metrics exported")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from configs.load import load_config
    from evaluation.facts import find_facts
    from ops.plan import plan

    print("\n".join(plan(load_config(options.config, list(options.set)), find_facts)))
    if options.calibrate:
        from ops.balance import calibrated

        print("\n".join(calibrated(options.config, list(options.set))))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from ops.doctor_machine import check_machine
    from ops.findings import FAULT

    if options.against and (options.subject or ".yaml").endswith((".yaml", ".yml")):
        from configs.load import ConfigError

        got = options.subject or "nothing"
        raise ConfigError([f"doctor --against: expected a run or its metrics file to compare with, got {got}"])
    findings = check_machine()
    print("\n".join(finding.line for finding in findings))
    if options.subject is not None:
        from ops.doctor_subject import examine

        print("\n".join(examine(options.subject, options.against, Path(options.folder))))
    return 5 if any(finding.level == FAULT for finding in findings) else 0


def _export(options: argparse.Namespace) -> int:
    from consumer.export.source import export_checkpoint

    target = None if options.target is None else Path(options.target)
    print("\n".join(export_checkpoint(_subject(options), options.format, options.out, target, options.dtype)[1]))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from evaluation.parity import verify

    findings = verify(options.drafter, options.target)
    print("\n".join(finding.line for finding in findings))
    return 0 if all(finding.good for finding in findings) else 2


def _eval(options: argparse.Namespace) -> int:
    from evaluation.command import evaluate

    evaluate(_subject(options), options)
    return 0


def _subject(options: argparse.Namespace) -> Path:
    """A folder with a drafter as it is given; any other word is a run."""
    path = Path(options.run)
    is_folder = any((path / name).is_file() for name in ("config.json", "checkpoint.json"))
    return path if is_folder else _found(options)


def _clean(_options: argparse.Namespace) -> int:
    from ops import commands

    print("\n".join(commands.clean()))
    return 0


def _found(options: argparse.Namespace) -> Path:
    from ops.run_folder import find_run

    return find_run(options.run, Path(options.folder))


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each command."""
    parser = argparse.ArgumentParser(
        prog="python launch.py", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {}
    for name, (_, text, add) in COMMANDS.items():
        add(one := subparsers.add_parser(name, help=text, description=text, allow_abbrev=False))
        parsers[name] = one
    return parser, parsers


def _settings(parser: argparse.ArgumentParser, what: str = "override settings") -> None:
    """`--set`, taken apart by _one_value_each before."""
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value ...", help=what)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, see configs/")
    _settings(parser)
    parser.add_argument("--name", help="name of the run (run.name)")
    parser.add_argument("--detach", action="store_true", help="run in the background")
    parser.add_argument("--nnodes", type=int, metavar="N", help="number of hosts; the same command on each")
    parser.add_argument("--node-rank", type=int, metavar="K", help="which host this is, 0 to N-1")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="address of node 0 and a free port there, where all meet")


def _prepare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, see configs/")
    _settings(parser)
    parser.add_argument("--name", help="name of the run (run.name)")
    parser.add_argument("--regenerate", action="store_true", help="let the target rewrite the answers")


def _of_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="name or folder; the newest live run if left out")
    parser.add_argument("--folder", default="runs", help="where run folders are kept")


def _status_options(parser: argparse.ArgumentParser) -> None:
    _of_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _dashboard_options(parser: argparse.ArgumentParser) -> None:
    _of_run(parser)
    parser.add_argument("--once", action="store_true", help="one picture")
    parser.add_argument("--json", action="store_true", help="one picture as a JSON object")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="one picture as an SVG file")


def _summary_options(parser: argparse.ArgumentParser) -> None:
    _of_run(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture of it as an SVG file")


def _restart_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", help="drafter, target or target:K")
    _of_run(parser)
    _settings(parser, "change settings")


def _set_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="section.key=value [RUN]", help="settings, and the run")
    parser.add_argument("--folder", default="runs", help="where run folders are kept")


def _telemetry_options(parser: argparse.ArgumentParser) -> None:
    _of_run(parser)
    parser.add_argument("--tensorboard", action="store_true", help="event files in RUN/tensorboard")
    parser.add_argument("--wandb", metavar="PROJECT", help="a Weights & Biases project")
    parser.add_argument("--prometheus", type=int, metavar="PORT", help="serve the latest numbers; 0 picks a port")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, see configs/")
    parser.add_argument("--calibrate", action="store_true", help="load both sides, measure 20 s, propose N:M")
    _settings(parser)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject", nargs="?", metavar="CONFIG|RUN|METRICS", help="a configuration, a run, or its metrics"
    )
    parser.add_argument("--against", metavar="RUN|METRICS", help="another run to compare with")
    parser.add_argument("--folder", default="runs", help="where run folders are kept")


def _of_drafter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|FOLDER", help="a run, a checkpoint's folder, or an exported drafter")
    parser.add_argument("--folder", default="runs", help="where run folders are kept")


def _export_options(parser: argparse.ArgumentParser) -> None:
    _of_drafter(parser)
    parser.add_argument("--format", choices=["zlab", "speculators"], default="zlab")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--target", metavar="DIR", help="the target's folder, if it has moved")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, metavar="DIR", help="an exported drafter")
    parser.add_argument("--target", required=True, help="its target: a folder or hub id")


def _eval_options(parser: argparse.ArgumentParser) -> None:
    _of_drafter(parser)
    parser.add_argument("--target", help="the target's folder or hub id; a run knows its own")
    parser.add_argument(
        "--prompts", nargs="+", required=True, metavar="SET", help="humaneval, gsm-symbolic, heldout, or FILE.jsonl"
    )
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tree", nargs="*", type=int, default=[], metavar="NODES", help="DDTree node budgets")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample instead of decoding greedily")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="cpu, cuda:0, ...")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where eval.json and acceptance.png go")


def _no_options(_parser: argparse.ArgumentParser) -> None:
    pass


Command = tuple[Callable[[argparse.Namespace], int], str, Callable[[argparse.ArgumentParser], None]]
COMMANDS: dict[str, Command] = {
    "run": (_run, "run a configuration (the word may be left out)", _run_options),
    "prepare": (_prepare, "read, tokenise and report a run's data, without training", _prepare_options),
    "status": (_status, "state, pids, occupancy and steps of a run's processes", _status_options),
    "dashboard": (_dashboard, "watch a run: rings, rates, states, and which side holds it up", _dashboard_options),
    "summary": (_summary, "show the table of a run that has ended", _summary_options),
    "restart": (_restart, "restart one side alone; the other keeps its model loaded", _restart_options),
    "pause": (_pass_on, "let every process stand still after its step", _of_run),
    "resume": (_pass_on, "let paused processes go on", _of_run),
    "checkpoint": (_pass_on, "let the drafter save a checkpoint now", _of_run),
    "set": (_set, "change training.log_every_steps, ring.min_ready or ring.pick in a living run", _set_options),
    "telemetry": (_telemetry, "feed a run's metrics to TensorBoard, W&B or Prometheus", _telemetry_options),
    "plan": (_plan, "print what a configuration would run, its sizes and memory, before loading", _plan_options),
    "doctor": (_doctor, "check the machine, and find what holds a run up", _doctor_options),
    "export": (_export, "write a drafter in a format that servers load", _export_options),
    "verify": (_verify, "check an exported drafter against a target", _verify_options),
    "eval": (_eval, "measure accepted length and speed in the decoding loop", _eval_options),
    "stop": (_stop, "stop a run gracefully: the drafter saves", _of_run),
    "clean": (_clean, "remove rings, drafters' states and sockets of which no process lives", _no_options),
}

if __name__ == "__main__":
    raise SystemExit(main())
