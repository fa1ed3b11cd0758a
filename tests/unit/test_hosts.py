"""Several hosts: what node 0 concludes from beats, what command line and cluster variables mean, addresses."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from configs.load import ConfigError, config_from
from configs.targets import TARGETS_ENV, targets_of
from ops import host_table as table_module
from ops import hosts as hosts_module
from ops.errors import ChildFailed, NoAnswer, NoResource
from ops.host_table import JOIN_S, SILENT_S, Beat, HostTable
from ops.hosts import HostPlace, JoinedHosts, config_digest, free_port, host_place, interface_of
from tests.helpers.ports import kept_port

LOST_S = 100.0


def beat(node: int, **values: Any) -> Beat:
    known = {"run": "r", "num_nodes": 2, "host": f"host{node}", "pid": 10 + node, "config": "c", "data": "d"}
    return Beat(**(known | {"node": node, "num_targets": 5 - node, "num_drafters": 3 + node} | values))


@pytest.fixture
def table() -> HostTable:
    ports = iter(range(1000, 2000))
    return HostTable(2, 0.0, LOST_S, lambda: next(ports))


def both(table: HostTable, now: float, *, one: dict[str, Any] | None = None, **values: Any) -> list[Any]:
    """Beats of both hosts, then what each is told."""
    table.hear(beat(0, **values), now)
    table.hear(beat(1, **(values | (one or {}))), now)
    return [table.word(node, now) for node in (0, 1)]


def test_all_hosts_start_the_first_life_when_all_are_there_and_have_prepared(table: HostTable) -> None:
    assert table.hear(beat(0, data=""), 1.0).verdict == "wait"
    word = table.hear(beat(1), 2.0)
    assert (word.verdict, word.complete) == ("wait", True)
    assert "preparing: node 0 (host0)" in word.reason
    first, second = both(table, 3.0)
    assert first.verdict == second.verdict == "go"
    assert (first.life, first.over, first.port) == (second.life, second.over, second.port) == (1, False, 1000)
    assert (first.num_targets, first.num_drafters) == ([5, 4], [3, 4])


def test_m03_preparation_may_take_as_long_as_it_lives(table: HostTable) -> None:
    for second in range(1, 4000, 5):
        words = both(table, float(second), one={"data": ""})
    assert {word.verdict for word in words} == {"wait"}


def test_a_life_that_is_over_on_one_host_is_over_for_all_and_the_next_begins_when_all_are_down(table) -> None:
    both(table, 1.0)
    running = {"life": 1, "down": False}
    assert not both(table, 2.0, **running)[0].over
    assert all(word.over for word in both(table, 3.0, **running, one={"over": True}))
    assert all(word.over for word in both(table, 4.0, **running, one={"over": True, "down": True}))
    again = both(table, 5.0, life=1, over=True, down=True)
    assert {(word.life, word.over, word.port) for word in again} == {(2, False, 1001)}


def test_a_silent_host_ends_the_life_and_its_return_begins_another(table: HostTable) -> None:
    both(table, 1.0)
    both(table, 2.0, life=1, down=False)
    word = table.hear(beat(0, life=1, down=False), 2.5 + SILENT_S)
    assert (word.verdict, word.over) == ("wait", True)
    assert "node 1 (host1): silent for" in word.reason
    assert word.others[0]["lost"]
    table.hear(beat(0, life=1, over=True), 3.0 + SILENT_S)
    word = table.hear(beat(1, pid=99), 4.0 + SILENT_S)
    assert (word.verdict, word.life, word.over) == ("go", 2, False)
    lost = table.hear(beat(0), 5.0 + SILENT_S + LOST_S)
    assert (lost.verdict, lost.exit_code) == ("fail", 4)


def test_a_host_that_comes_back_before_its_silence_was_noticed_ends_the_life_too(table: HostTable) -> None:
    both(table, 1.0)
    both(table, 2.0, life=1, down=False)
    taken = table.hear(beat(1, pid=99), 3.0)
    assert taken.verdict == "wait"
    assert "--node-rank 1 is taken by node 1 (host1), pid 11" in taken.reason
    assert table.hear(beat(1, pid=99), 8.0).over


def test_a_node_0_that_comes_back_learns_the_number_of_the_last_life_from_the_others(table: HostTable) -> None:
    table.hear(beat(0), 1.0)
    word = table.hear(beat(1, life=7, over=True, down=True), 2.0)
    assert (word.life, word.over) == (8, False)


def test_a_host_that_did_not_join_is_named(table: HostTable) -> None:
    assert table.hear(beat(0), JOIN_S - 1).verdict == "wait"
    word = table.hear(beat(0), JOIN_S + 1)
    assert (word.verdict, word.exit_code) == ("fail", 4)
    assert "node 1 did not join within 30 s" in word.reason


@pytest.mark.parametrize(
    ("values", "words", "code"),
    [
        ({"config": "other"}, "node 1 (host1): its configuration differs from node 0 (host0)'s", 2),
        ({"num_nodes": 3}, "node 1 (host1): --nnodes 3 --node-rank 1, but node 0 was started with --nnodes 2", 2),
        ({"run": "s"}, "node 1 (host1): run 's', but node 0 runs 'r'", 2),
        ({"data": "other"}, "node 1 (host1): its data or target differs from node 0 (host0)'s", 3),
        ({"phase": "failed", "reason": "no GPU", "exit_code": 5}, "node 1 (host1): no GPU", 5),
    ],
)
def test_a_host_that_does_not_fit_is_named_to_both(table: HostTable, values: Any, words: str, code: int) -> None:
    told = table.hear(beat(0), 1.0), table.hear(beat(1, **values), 1.0), table.hear(beat(0), 1.5)
    for word in told[1:]:
        assert (word.verdict, word.exit_code) == ("fail", code)
        assert words in word.reason


def test_a_host_with_other_numbers_than_before_is_refused(table: HostTable) -> None:
    both(table, 1.0)
    word = table.hear(beat(1, pid=99, num_targets=1), 30.0)
    assert (word.verdict, word.exit_code) == ("fail", 2)
    assert "came back with 1 targets and 4 drafters, it had 4 and 4" in word.reason


def test_a_stop_on_one_host_stops_all_and_is_no_end_of_the_life(table: HostTable) -> None:
    both(table, 1.0)
    words = both(table, 2.0, life=1, down=False, one={"phase": "stopping"})
    assert {(word.verdict, word.over) for word in words} == {("stop", False)}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ((None, None, None), {}, None),
        ((1, 0, None), {}, None),
        ((2, 1, "a:29400"), {}, HostPlace(2, 1, "a", 29400)),
        (
            (None, None, None),
            {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "MASTER_ADDR": "n0", "MASTER_PORT": "29400"},
            HostPlace(4, 3, "n0", 29400),
        ),
        ((None, None, "n0:1234"), {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, HostPlace(2, 0, "n0", 1234)),
        ((None, None, None), {"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, None),
        (
            (None, None, None),
            {
                "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1",
                "MASTER_ADDR": "n0", "MASTER_PORT": "29400",
            },
            HostPlace(2, 1, "n0", 29401),
        ),
    ],
)  # fmt: skip
def test_which_host_this_is(options: Any, environment: dict[str, str], expected: HostPlace | None) -> None:
    assert host_place(*options, environment) == expected


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ((2, None, "a:1"), {}, "--node-rank"),
        ((2, 0, None), {}, "--rdzv HOST:PORT"),
        ((2, 2, "a:1"), {}, r"--node-rank: expected 0\.\.1"),
        ((2, 0, "a"), {}, "--rdzv: expected HOST:PORT, got 'a'"),
        ((None, None, None), {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node 1"),
    ],
)
def test_half_an_address_is_refused(options: Any, environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        host_place(*options, environment)


def test_what_may_differ_between_hosts_is_not_in_the_digest_of_the_configuration() -> None:
    mine = config_from({"run": {"folder": "a"}, "target": {"devices": ["cpu"] * 5}, "training": {"threads": 2}})
    theirs = config_from({"run": {"folder": "b"}})
    assert config_digest(mine) == config_digest(theirs)
    assert config_digest(mine) != config_digest(config_from({"optimizer": {"lr": 1e-5}}))


def joined(node: int, port: int, address: str = "127.0.0.1") -> JoinedHosts:
    return JoinedHosts(HostPlace(2, node, address, port), config_from({}), LOST_S, lambda: {"node": node})


def keep_checking(hosts: JoinedHosts) -> None:
    while True:
        hosts.check()
        time.sleep(0.02)


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as kept:
        yield kept


def test_two_launchers_join_agree_and_see_each_other(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hosts_module, table_module):  # a process that stands still for a while is no lost host here
        monkeypatch.setattr(module, "JOIN_S", 1e9)
        monkeypatch.setattr(module, "SILENT_S", 1e9)
    pair = [joined(node, port) for node in (0, 1)]
    try:
        for hosts in pair:
            hosts.start()
        for hosts in pair:
            hosts.join(lambda _: None, lambda: False)
        pair[1]._change(phase="prepared", data="d")
        pair[0].wait_for_data("d", lambda _: None, lambda: False)
        pair[1].wait_for_data("d", lambda _: None, lambda: False)
        lives = [hosts.life() for hosts in pair]
        assert lives[0] == lives[1] is not None
        assert [hosts.fleet[:2] for hosts in pair] == [(0, 2), (1, 2)]
        assert [hosts.others()[0]["node"] for hosts in pair] == [1, 0]
        pair[1].leave("failed", "its GPU fell off the bus", 5)
        with pytest.raises(ChildFailed, match=r"node 1 .*: its GPU fell off the bus"):
            keep_checking(pair[0])
    finally:
        for hosts in reversed(pair):
            hosts.close()


def test_m05_an_unreachable_node_0_is_named_with_this_hosts_own_address(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "JOIN_S", 1.0)
    said: list[str] = []
    hosts = joined(1, port)
    hosts.start()
    try:
        with pytest.raises(
            NoAnswer, match=rf"node 1 \(.*, 127\.0\.0\.1\): no answer from node 0 at 127\.0\.0\.1:{port}"
        ):
            hosts.join(said.append, lambda: False)
    finally:
        hosts.close()
    assert "address 127.0.0.1 on lo" in said[0]


@pytest.mark.parametrize("node", [0, 1])
def test_a_thread_that_is_no_longer_waited_for_keeps_its_sockets_until_it_ends(
    node: int, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process was suspended while it closed: close() has given up, and the thread still polls."""
    hosts = joined(node, port)
    hosts.start()
    thread = hosts._thread
    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", lambda _limit_s: None)
        hosts.close()
    thread.join(300)
    assert not thread.is_alive()
    assert hosts._context.closed


def test_node_0_refuses_an_address_that_is_not_its_own() -> None:
    with pytest.raises(NoResource, match=r"node 0 cannot listen there|no way to"):
        joined(0, 29400, "192.0.2.1")
    with pytest.raises(ConfigError, match="no such host"):
        joined(0, 29400, "no-such-host.invalid")


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_m04_pack_ids_and_rings_go_by_global_rank() -> None:
    config = config_from({"target": {"devices": ["cpu", "cpu"]}})
    assert targets_of(config, {}) == (0, 2, 2)
    second_host = targets_of(config, {TARGETS_ENV: "3:2:5"})
    assert list(second_host.ranks) == [3, 4]
    assert second_host.text == "3:2:5"


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def test_a_free_port_can_be_bound() -> None:
    assert any(can_bind(free_port("127.0.0.1")) for _ in range(20)), "one may be taken by another process meanwhile"
