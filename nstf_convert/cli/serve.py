"""`nstf serve`: an OpenAI-compatible server for one artifact."""

import os
import select
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from nstf.errors import NstfError, UsageError
from nstf.runtime.artifact.atomic_file import disk_fault
from nstf_convert import cli
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import clean
from nstf_convert.cli.sizes import parse_bytes

KEY_VARIABLE = "NSTF_API_KEY"
MOST_KEY = 4096  # letters: heads of requests end at 16 KiB
MOST_TEXT = 1 << 24  # bytes of a key or a chat template; a device has no end
WAITED = 30  # seconds for those who write into a pipe


def serve(
    artifact: ArtifactPath,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"A file with the key that clients must send; or set {KEY_VARIABLE}."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=100, help="Answers decoded together.")] = 8,
    queue: Annotated[int, typer.Option(min=0, max=100000, help="Requests that may wait; more get 429.")] = 32,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer; the model's context by default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer at most; what fits by default.")
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "4MiB",
    name: Annotated[str | None, typer.Option(help="The model's name; the file's by default.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A chat template (Jinja) in the place of the file's own.")
    ] = None,
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible",
            help="An answer never depends on what runs beside it, to the last bit; slower for one to three clients.",
        ),
    ] = False,
    prefix_reuse: Annotated[
        bool, typer.Option(help="Keep caches of answers for prompts that begin alike.")
    ] = True,
    exact: Annotated[
        bool, typer.Option("--exact", help="No int8 activations on the CPU: slower, as the file decodes.")
    ] = False,
    kv_cache: options.KvCache = "float16",
    attention: options.Attention = "full",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="A file of `nstf compile` for this GPU; its code runs there, so one that you trust."
        ),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Serve an artifact by OpenAI's API, with a chat page at /.

    Example: nstf serve model.nstf --port 8000
    """
    options.check_file(artifact)
    options.check_kv_cache(kv_cache)
    options.check_kernels(kernels, device)
    options.check_attention(attention, kv_cache)
    if device.partition(":")[0] != "cpu":
        options.check_device(device)
        options.refuse_cpu_options(exact, kv_cache)
    key = _key(api_key_file)
    most_bytes = parse_bytes(max_body, "--max-body")
    template = None if chat_template is None else read_text(chat_template, "--chat-template")
    try:
        from nstf.integrations.serve.app import App
        from nstf.integrations.serve.server import AddressError, allowed_hosts, is_local, run
    except ImportError as error:
        raise UsageError(
            f"nstf serve needs {error.name}; in a clone of the repository: pip install -e '.[serve]'"
        ) from error
    from nstf.integrations.serve.service import ServeOptions, Service
    from nstf.runtime.memory_limit import share_one_heap

    share_one_heap()
    service = Service(
        artifact,
        ServeOptions(
            clean(name or "") or clean(artifact.stem), parallel, queue, context, max_tokens, threads, kv_cache, exact,
            reproducible, prefix_reuse, device, kernels, template, attention,
        ),
    )  # fmt: skip
    if service.note is not None:
        _say(f"{service.backend.name}: {service.note}")
    if not service.prompts.has_template:
        _say(
            f"{artifact.name} has no chat template: /v1/completions and the page continue texts; see --chat-template"
        )
    if key is None and not is_local(host):
        _say(f"warning: everyone who reaches {host} can use this server; set a key with --api-key-file")
    app = App(service, key, allowed_hosts(host, key), most_bytes)

    def ready(taken: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        _say(f"{service.options.name} on http://{shown}:{taken} ({service.backend.name}); Ctrl-C ends it")

    try:
        run(app, host, port, ready)
    except AddressError as error:
        raise NstfError(f"{error} (--port, --host)") from error
    finally:
        service.close()
    if cli.OWN_PROCESS:
        _end_beside_threads()


def _end_beside_threads() -> None:
    """Ends the process where a thread goes on with a request (a schema, a tokenizer's expressions) that nobody waits for any
    more: Python would wait for it."""
    own = threading.main_thread()
    if any(thread is not own and not thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _key(file: Path | None) -> str | None:
    """The key of a file or of the environment: an argument would be seen by everyone on the machine."""
    found = os.environ.get(KEY_VARIABLE) if file is None else read_text(file, "--api-key-file").strip()
    if found is None:
        return None
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(
            f"the API key in {file or KEY_VARIABLE} must be printable ASCII without spaces, not empty"
        )
    if len(found) > MOST_KEY:
        raise UsageError(
            f"the API key in {file or KEY_VARIABLE} has {len(found)} letters; clients can send {MOST_KEY}"
        )
    return found


def read_text(file: Path, option: str) -> str:
    """A text file named by an option. Raises UsageError, and NstfError where the disk fails."""
    try:
        found = _bytes_of(file, option)
        if len(found) > MOST_TEXT:
            raise UsageError(f"{option} {file}: longer than {MOST_TEXT} bytes")
        return found.decode().replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        kind = NstfError if disk_fault(error) or _is_out_of_sight(file) else UsageError
        raise kind(f"{option} {file}: cannot be read ({clean(error)})") from error


def _bytes_of(file: Path, option: str) -> bytes:
    """What a file or a pipe holds, and one byte more than MOST_TEXT where there is more. Raises UsageError for a pipe into
    which nobody writes for WAITED seconds, OSError as reading does."""
    # Opening a named pipe without O_NONBLOCK would wait for its writer.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as opened:
        coming = select.poll()
        coming.register(opened, select.POLLIN)
        parts = bytearray()
        while len(parts) <= MOST_TEXT:
            if not coming.poll(1000 * WAITED):
                raise UsageError(f"{option} {file}: nobody wrote into it for {WAITED} seconds; give a file")
            part = opened.read(MOST_TEXT + 1 - len(parts))
            if part == b"":
                break
            parts += part or b""
    return bytes(parts)


def _is_out_of_sight(file: Path) -> bool:
    """Whether the machine does not say what lies there: in a folder that may not be searched, or behind a link into one."""
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _say(text: str) -> None:
    sys.stderr.write(f"{clean(text)}\n")
    sys.stderr.flush()
