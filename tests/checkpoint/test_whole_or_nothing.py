"""Whatever happens on the way, the target is whole or absent, and the next call ends where an undisturbed one would."""

import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import read_header
from moeprune.checkpoint import atomic_directory, rewrite, shards
from moeprune.checkpoint.atomic_directory import AtomicDirectory
from moeprune.checkpoint.audit import AuditError
from moeprune.checkpoint.inventory import inventory
from moeprune.checkpoint.prune import plan_pruning, prune_checkpoint
from tests.checkpoint.sources import INDEX, KEPT, files, plan_for
from tests.tiny import save_tiny

OTHERS = (0, 1, 4, 5)  # experts that another plan keeps
# What changes a file or a directory, or is about to.
CHANGES = ("open", "write", "fsync", "fdatasync", "rename", "replace", "mkdir", "unlink", "rmdir")


def run_until(number, call):
    """How often a child process that makes the call got to change the disk; it is killed before the change `number`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        shards.BUFFER = 3000  # bytes: many places to be killed in
        shards.STEP = 5000
        done = 0

        def counted(change):
            def before(*arguments, **options):
                nonlocal done
                if done == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                return change(*arguments, **options)

            return before

        pipe_write = os.write
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        call()
        pipe_write(writing, str(done).encode())
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 100)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return number
    assert os.WEXITSTATUS(status) == 0
    return int(answer)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """(source, plan, the files an undisturbed call writes)."""
    root = tmp_path_factory.mktemp("work")
    source = save_tiny("deepseek_v3", root / "source", dtype="bfloat16", shard_size="30KB")
    plan = plan_for(source)
    prune_checkpoint(source, plan, root / "expected")
    return source, plan, files(root / "expected")


def moments(total):
    """Numbers of changes to be killed before: spread over the whole call, and every one around its end."""
    return [*range(0, total - 20, max(1, total // 12)), *range(total - 20, total + 1)]


@pytest.fixture(scope="module")
def write(work):
    """A function that writes what a plan keeps: all of a call that changes the disk, without planning it anew."""
    source = work[0]
    checkpoint = inventory(source)
    planned = {kept: plan_pruning(checkpoint, plan_for(source, kept).kept, len(kept))[0] for kept in (KEPT, OTHERS)}

    def write(out, kept=KEPT, overwrite=False):
        target = AtomicDirectory(out, source=source, overwrite=overwrite)
        rewrite.write_work(planned[kept], target, finish=lambda directory, entries: {"README.md": "card"})

    return write


@pytest.fixture(scope="module")
def written(write, tmp_path_factory):
    """The files an undisturbed call of `write` leaves."""
    root = tmp_path_factory.mktemp("written")
    write(root / "out")
    return files(root / "out")


def test_a_kill_leaves_nothing_or_the_whole(write, written, tmp_path):
    out = tmp_path / "out"
    total = run_until(None, lambda: write(out))
    outcomes = set()
    for number in moments(total):
        shutil.rmtree(out)
        killed = run_until(number, lambda: write(out)) == number != total
        outcomes.add((killed, out.exists()))
        assert killed or out.exists()
        if out.exists():
            assert files(out) == written
        write(out, overwrite=out.exists())
        assert files(out) == written
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {(True, False), (True, True), (False, True)} == outcomes


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_while_replacing_leaves_the_old_or_the_new(exchange, write, written, tmp_path, monkeypatch):
    """Where directories cannot be swapped in one step, neither is there for a moment; the next call brings one back."""
    if not exchange:
        monkeypatch.setattr(atomic_directory, "exchange", lambda a, b: False)
    out = tmp_path / "out"
    write(out, OTHERS)
    before = files(out)
    total = run_until(None, lambda: write(out, overwrite=True))
    for number in moments(total):
        write(out, OTHERS, overwrite=True)
        run_until(number, lambda: write(out, overwrite=True))
        left = files(out) if out.exists() else None
        assert left in ((before, written) if exchange else (before, written, None))
        write(out, overwrite=True)
        assert files(out) == written
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted_after(shards_done, source, plan, out):
    """A call that fails when this many files are whole, as a full disk would make it."""
    real = rewrite.write_shard
    count = 0

    def failing(*arguments):
        nonlocal count
        if count == shards_done:
            raise OSError(28, "No space left on device")
        count += 1
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrite, "write_shard", failing)
        with pytest.raises(InputError, match="disk is full"):
            prune_checkpoint(source, plan, out)
    assert not out.exists()


def test_files_that_were_whole_are_used_again(work, tmp_path):
    source, plan, expected = work
    out = tmp_path / "out"
    interrupted_after(2, source, plan, out)
    first = sorted((tmp_path / ".out.moeprune-partial" / "checkpoint").glob("*.safetensors"))[0]
    times, size = first.stat().st_mtime_ns, first.stat().st_size
    seen = []
    report = prune_checkpoint(source, plan, out, on_progress=lambda done, total: seen.append(done))
    assert report.reused_shards == 2
    assert files(out) == expected
    assert (out / first.name).stat().st_mtime_ns == times
    assert seen[0] > size


def test_another_plan_starts_anew(work, tmp_path):
    source, plan, expected = work
    out = tmp_path / "out"
    # The same counts: names, shapes and sizes of the two results are equal, only the bytes differ.
    interrupted_after(2, source, plan_for(source, (1, 2, 3, 4, 6, 7)), out)
    assert prune_checkpoint(source, plan, out).reused_shards == 0
    assert files(out) == expected


def test_a_source_that_changed_starts_anew(work, tmp_path):
    source, plan, _ = work
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    out = tmp_path / "out"
    interrupted_after(2, copy, plan, out)
    touched = sorted(copy.glob("*.safetensors"))[0]
    os.utime(touched, ns=(0, touched.stat().st_mtime_ns + 1))
    assert prune_checkpoint(copy, plan, out).reused_shards == 0


def test_a_target_that_is_not_empty_is_refused_or_replaced_as_a_whole(work, tmp_path):
    source, plan, expected = work
    out = tmp_path / "out"
    prune_checkpoint(save_tiny("deepseek_v3", tmp_path / "other", seed=5), plan_for(tmp_path / "other"), out)
    (out / "tokenizer_from_elsewhere.model").write_text("old")
    before = files(out)
    with pytest.raises(InputError, match="--overwrite"):
        prune_checkpoint(source, plan, out)
    assert files(out) == before
    prune_checkpoint(source, plan, out, overwrite=True)
    assert files(out) == expected  # R20: no file of the other model is left, the index names what is there
    assert INDEX in files(out)


def test_an_empty_directory_is_no_obstacle(work, tmp_path):
    source, plan, expected = work
    (tmp_path / "out").mkdir()
    prune_checkpoint(source, plan, tmp_path / "out")
    assert files(tmp_path / "out") == expected


def test_a_link_to_a_directory_is_followed(work, tmp_path):
    source, plan, expected = work
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    prune_checkpoint(source, plan, tmp_path / "out")
    assert files(tmp_path / "disk" / "real") == expected


def test_two_processes_do_not_write_to_the_same_place(work, tmp_path):
    source, plan, _ = work
    partial = tmp_path / ".out.moeprune-partial"
    partial.mkdir()
    with (partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            prune_checkpoint(source, plan, tmp_path / "out")
    prune_checkpoint(source, plan, tmp_path / "out")


def test_too_little_room_is_known_before_writing(work, tmp_path, monkeypatch):
    source, plan, expected = work
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(rewrite.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(InputError, match="GiB"):
        prune_checkpoint(source, plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    prune_checkpoint(source, plan, tmp_path / "out")
    assert files(tmp_path / "out") == expected


def test_a_failed_audit_puts_nothing_in_place(work, tmp_path, monkeypatch):
    """A router's row that arrives wrong on disk is noticed although names, shapes and sizes are right."""
    source, plan, _ = work
    real = rewrite.write_shard

    def wrong(shard, source, target, on_bytes):
        descriptor = real(shard, source, target, on_bytes)
        for entry in read_header(target)[0]:
            if entry.name == "model.layers.1.mlp.gate.weight":
                os.pwrite(descriptor, bytes(8), entry.start)
        return descriptor

    monkeypatch.setattr(rewrite, "write_shard", wrong)
    with pytest.raises(AuditError, match=r"model\.layers\.1\.mlp"):
        prune_checkpoint(source, plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_shrinks_while_it_is_read(work, tmp_path):
    source, plan, _ = work
    copy = tmp_path / "source"
    shutil.copytree(source, copy)

    def shrink(done, total):
        for path in copy.glob("*.safetensors"):
            os.truncate(path, 9000)

    with pytest.raises(InputError, match="shorter"):
        prune_checkpoint(copy, plan, tmp_path / "out", on_progress=shrink)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", [".", "..", "repository"])
def test_a_directory_that_holds_more_than_a_checkpoint_is_not_replaced(where, work, tmp_path, monkeypatch):
    source, plan, _ = work
    (tmp_path / "here" / "repository" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="more than a checkpoint"):
        prune_checkpoint(source, plan, Path(where), overwrite=True)
    assert (tmp_path / "here" / "repository" / ".git").exists()
