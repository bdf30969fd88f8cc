"""What an export leaves when it is killed, and how it takes the place of an older one."""

import os
import signal
from pathlib import Path

import pytest

from nstf.errors import UsageError
from nstf_convert.export import writing


def killed(output: Path) -> None:
    """An export in a process that is killed with some of its files written."""
    child = os.fork()
    if child == 0:
        with writing.staged(output) as folder:
            (folder / "half").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def export(output: Path, content: bytes) -> None:
    with writing.staged(output, overwrite=True) as folder:
        (folder / "README.md").write_text(f"{writing.MARK}\n")
        (folder / "config.json").write_bytes(content)


def test_what_a_killed_export_left_is_removed_by_the_next_of_its_name(tmp_path: Path) -> None:
    killed(tmp_path / "[x]"), killed(tmp_path / "y")
    (tmp_path / ".[x].old.01234567").mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    # What was replaced goes only when there is something in its place.
    export(tmp_path / "[x]", b"new")
    assert sorted(p.name[:4] for p in tmp_path.iterdir()) == [".[x]", ".y.p", "[x]"]
    export(tmp_path / "[x]", b"new")
    assert sorted(p.name[:4] for p in tmp_path.iterdir()) == [".y.p", "[x]"]


def test_an_input_in_a_folder_of_such_a_name_stays(tmp_path: Path) -> None:
    """The artifact that was exported went with it."""
    for name in (".out.part.abcdefgh", ".out.old.abcdefgh"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "README.md").write_text(f"{writing.MARK}\n")
        (folder / "a.nstf").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    given = [tmp_path / ".out.part.abcdefgh" / "a.nstf"]
    with writing.staged(tmp_path / "out", inputs=given) as partial:
        (partial / "README.md").write_text(f"{writing.MARK}\n")
    assert given[0].read_bytes() == b"mine" and not (tmp_path / ".out.old.abcdefgh").exists()


def test_the_files_of_an_export_at_work_stay(tmp_path: Path) -> None:
    with writing.staged(tmp_path / "x", overwrite=True) as folder:
        (folder / "config.json").write_bytes(b"first")
        export(tmp_path / "x", b"second")
        assert (folder / "config.json").read_bytes() == b"first"
    assert [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()] == [b"first"]


@pytest.mark.parametrize("can", [True, False])
def test_an_older_export_is_replaced_whether_the_system_can_exchange_names_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    if not can:
        monkeypatch.setattr(writing, "_exchange", lambda *_: False)
    export(tmp_path / "x", b"first"), export(tmp_path / "x", b"second")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "config.json").read_bytes() == b"second"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("when", ["while files are synced", "after the last look"])
def test_a_folder_that_appears_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, when: str
) -> None:
    """It was exchanged for the export, and removed."""

    def appear(*_: object) -> None:
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / "notes.txt").write_text("precious")

    if when == "after the last look":
        if overwrite:
            pytest.skip("what --overwrite replaces, a look decides")
        monkeypatch.setattr(writing, "check_destination", appear)
    else:
        monkeypatch.setattr(writing, "_sync", appear)
    with pytest.raises(UsageError, match=r"exists|no export"):
        with writing.staged(tmp_path / "x", overwrite=overwrite) as folder:
            (folder / "README.md").write_text(f"{writing.MARK}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("at", ["m.README.md", "m.onnx", "m.onnx.data"])
def test_a_file_that_appears_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It was replaced where it came after the last look."""
    names, moved = ["m.README.md", "m.onnx", "m.onnx.data"], writing._move_files

    def appear(files: list[Path], output: Path) -> None:
        (tmp_path / at).write_text("precious")
        moved(files, output)

    monkeypatch.setattr(writing, "_move_files", appear)
    with pytest.raises(UsageError, match=f"{at} exists: give another output"):
        with writing.staged(tmp_path / "m.onnx", single_file=True) as folder:
            for name in names:
                (folder / name).write_bytes(b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(at, "precious")]
    monkeypatch.setattr(writing, "_move_files", moved)
    (tmp_path / at).unlink()
    with writing.staged(tmp_path / "m.onnx", single_file=True) as folder:
        for name in names:
            (folder / name).write_bytes(b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_an_empty_folder_becomes_the_export(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with writing.staged(tmp_path / "x") as folder:
        (folder / "README.md").write_text(f"{writing.MARK}\n")
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["README.md"]


def test_folders_of_like_names_that_are_not_ours_stay(tmp_path: Path) -> None:
    theirs = [tmp_path / name for name in (".m.old.20241123", ".m.part.my-notes")]
    ours = tmp_path / ".m.part.01234567"
    for folder in (*theirs, ours):
        folder.mkdir()
        (folder / "precious").write_text("here")
    (ours / writing.UNFINISHED).touch()
    for overwrite in (False, True):
        with writing.staged(tmp_path / "m", overwrite=overwrite) as partial:
            (partial / "README.md").write_text(f"tags:\n{writing.MARK}\n")
    assert [(folder / "precious").exists() for folder in theirs] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.old.20241123", ".m.part.my-notes", "m"]
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["README.md"]


def test_an_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / "m").mkdir(parents=True)
    (tmp_path / "disk" / "m" / "README.md").write_text(f"{writing.MARK}\n")
    (tmp_path / "m").symlink_to(tmp_path / "disk" / "m")
    with writing.staged(tmp_path / "m", overwrite=True) as partial:
        assert partial.parent == tmp_path / "disk"
        (partial / "new").write_text("here")
    assert (tmp_path / "m").is_symlink()
    assert [path.name for path in (tmp_path / "disk" / "m").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "m"]


@pytest.mark.parametrize("kind", ["file", "pipe", "folder"])
@pytest.mark.parametrize("linked", [True, False])
def test_nothing_of_another_kind_is_replaced(tmp_path: Path, kind: str, linked: bool) -> None:
    """A folder took the place of a file, and of a device: root could lose /dev/null."""
    there = tmp_path / "there.gguf"
    {"file": Path.touch, "pipe": os.mkfifo, "folder": Path.mkdir}[kind](there)
    output = tmp_path / "link" if linked else there
    if linked:
        output.symlink_to(there)
    before = there.stat()
    wrong = [single for single in (True, False) if (kind == "pipe" or single == (kind == "folder"))]
    for single in wrong:
        with pytest.raises(UsageError, match=r"is there and is no|is no export"):
            writing.check_destination(output, overwrite=True, single_file=single)
    if len(wrong) == 1:
        writing.check_destination(output, overwrite=True, single_file=not wrong[0])
    assert there.stat() == before and output.is_symlink() == linked


@pytest.mark.parametrize("at", range(4))
def test_a_kill_leaves_no_graph_beside_the_weights_of_another(tmp_path: Path, at: int) -> None:
    """It left the old graph, which named the new one's weights."""
    names = ["m.README.md", "m.onnx", "m.onnx.data"]

    def write(content: bytes) -> None:
        with writing.staged(tmp_path / "m.onnx", single_file=True, overwrite=True) as folder:
            for name in names:
                (folder / name).write_bytes(content)

    write(b"old")
    child = os.fork()
    if child == 0:
        real, calls = Path.replace, 0

        def replace(file: Path, target: Path) -> Path:
            nonlocal calls
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return real(file, target)

        Path.replace = replace  # type: ignore[method-assign, assignment]
        write(b"new")
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert killed is (at < len(names))
    found = {(tmp_path / name).read_bytes() for name in names[1:] if (tmp_path / name).exists()}
    assert len(found) == 1 or not (tmp_path / "m.onnx").exists()
    write(b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == dict.fromkeys(names, b"new")


def single(output: Path, content: bytes, **files: bytes) -> None:
    with writing.staged(output, single_file=True, overwrite=True) as folder:
        (folder / output.name).write_bytes(content)
        for name, data in {f"{output.name}.data": content, "x.README.md": content}.items():
            (folder / name).write_bytes(data)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
@pytest.mark.parametrize("name", ["x.onnx.data", "x.README.md"])
def test_a_file_of_an_export_replaces_nothing_of_another_kind(tmp_path: Path, name: str, kind: str) -> None:
    output, beside = tmp_path / "x.onnx", tmp_path / name
    single(output, b"first")
    beside.unlink()
    make = {"folder": beside.mkdir, "pipe": lambda: os.mkfifo(beside), "link": lambda: beside.symlink_to("y")}
    make[kind]()
    for call in (
        lambda: writing.check_destination(output, True, True, [name]),
        lambda: single(output, b"second"),
    ):
        with pytest.raises(UsageError, match=f"{name} is there and is no regular file"):
            call()
    assert output.read_bytes() == b"first" and beside.is_symlink() == (kind == "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.README.md", "x.onnx", "x.onnx.data"]


@pytest.mark.parametrize("fault", [OSError(5, "Input/output error", "x.onnx.data"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["weights", "sync"])
def test_an_older_file_has_its_name_back_where_its_weights_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, where: str
) -> None:
    output = tmp_path / "x.onnx"
    single(output, b"first")
    move, sync = Path.replace, writing._sync

    def replace(self: Path, target: Path) -> Path:
        if where == "weights" and Path(target).suffix == ".data":
            raise fault
        return move(self, target)

    def fails(path: Path) -> None:
        if where == "sync" and path == tmp_path:
            raise fault
        sync(path)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(writing, "_sync", fails)
    with pytest.raises(type(fault)):
        single(output, b"second")
    assert output.read_bytes() == b"first" == output.with_name("x.onnx.data").read_bytes()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_link_into_a_folder_that_is_missing_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "l").symlink_to("missing/x")
    with pytest.raises(UsageError, match="missing does not exist: create it"):
        writing.check_destination(tmp_path / "l", False)


def test_a_file_whose_name_is_not_utf8_is_wrong_use(tmp_path: Path) -> None:
    """ONNX ended in an error that nobody foresaw, and GGUF called the artifact wrong."""
    with pytest.raises(UsageError, match="the name is not UTF-8"):
        writing.check_destination(tmp_path / "\udcff.gguf", False, single_file=True)


def test_a_link_is_nothing_that_an_export_replaces(tmp_path: Path) -> None:
    """Neither one that leads nowhere, by whose target's name a GGUF became a folder, nor one in an older export."""
    (tmp_path / "g.gguf").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"g\.gguf is a link to .*nowhere, which is not there"):
        writing.check_destination(tmp_path / "g.gguf", True, single_file=True)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "README.md").write_text(f"{writing.MARK}\n")
    (tmp_path / "model.nstf").write_bytes(b"theirs")
    (folder / "model.safetensors").symlink_to("../model.nstf")
    with pytest.raises(UsageError, match=r"holds model\.safetensors, which no export writes"):
        writing.check_destination(folder, overwrite=True)


@pytest.mark.parametrize("name", ["Model-F16.gguf", "other.onnx", "other.onnx.data"])
def test_a_file_of_another_tool_in_an_export_is_not_replaced(tmp_path: Path, name: str) -> None:
    """llama.cpp's converter writes its .gguf into the folder that it reads: an export to hf, say."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "README.md").write_text(
        f'{writing.MARK}\nmodel = Llama("m.gguf")\nInferenceSession("m.onnx")\n'
    )
    for own in ("model.safetensors", "config.json", "m.gguf", "m.onnx", "m.onnx.data"):
        (folder / own).write_bytes(b"ours")
    writing.check_destination(folder, overwrite=True)
    (folder / name).write_bytes(b"theirs")
    with pytest.raises(UsageError, match=rf"holds {name}, which no export writes"):
        writing.check_destination(folder, overwrite=True)


def test_the_only_graph_of_its_name_stays_until_there_is_another(tmp_path: Path) -> None:
    """Killed before its weights were replaced, an export left the older graph in its hidden folder, and the next one
    removed it before it had written anything."""
    output = tmp_path / "x.onnx"
    single(output, b"first")
    child = os.fork()
    if child == 0:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
        single(output, b"second")
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (older,) = tmp_path.glob(f".x.onnx.part.*/{writing.OLDER}")
    assert not output.exists() and older.read_bytes() == b"first"
    with pytest.raises(ZeroDivisionError), writing.staged(output, single_file=True, overwrite=True):
        _ = 1 // 0
    assert older.read_bytes() == b"first"
    single(output, b"third")
    assert output.read_bytes() == b"third" and not older.exists()


def test_an_export_takes_the_mode_of_the_folder_whose_place_it_has(tmp_path: Path) -> None:
    """What its owner had made private was readable by all."""
    output = tmp_path / "x"
    output.mkdir(mode=0o700)
    for content in (b"first", b"second"):
        export(output, content)
        assert output.stat().st_mode & 0o777 == 0o700 and (output / "config.json").read_bytes() == content


@pytest.mark.parametrize("how", ["current", "mounted"])
def test_a_folder_that_cannot_be_replaced_is_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The shell stood in a removed folder; on a disk of its own an export ended after all the work."""
    if how == "current":
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(UsageError, match="give a new folder in it"):
        writing.check_destination(Path() if how == "current" else tmp_path, True)
    writing.check_destination(tmp_path / "new", True)
    writing.check_destination(tmp_path / "new.onnx", True, single_file=True)
