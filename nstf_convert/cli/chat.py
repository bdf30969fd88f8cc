"""`nstf chat`: a conversation in the terminal."""

import sys
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nstf.errors import UsageError
from nstf_convert.cli import options
from nstf_convert.cli.inspect import ArtifactPath
from nstf_convert.cli.output import clean
from nstf_convert.cli.serve import read_text

if TYPE_CHECKING:
    from nstf.integrations.serve.output import Piece
    from nstf.integrations.serve.service import Service
    from nstf.runtime.token_sampler import Settings

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /help shows this, /exit ends (or Ctrl-D)"


def chat(
    artifact: ArtifactPath,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer at most; what fits by default.")
    ] = None,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    stop: options.Stop = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the answers; random by default.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A chat template (Jinja) in the place of the file's own.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="No int8 activations on the CPU: slower, as the file decodes.")
    ] = False,
    kv_cache: options.KvCache = "float16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on (ROCm is called cuda).")] = "cpu",
    threads: options.Threads = None,
) -> None:
    """Chat with an artifact in the terminal. Ctrl-C stops an answer, /help lists what else can be typed.

    Example: nstf chat model.nstf --system "You answer in one sentence."
    """
    options.check_file(artifact)
    options.check_kv_cache(kv_cache)
    if device.partition(":")[0] != "cpu":
        options.check_device(device)
        options.refuse_cpu_options(exact, kv_cache)
    settings = options.sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    stops = tuple(options.check_stops(stop))
    template = None if chat_template is None else read_text(chat_template, "--chat-template")
    from nstf.integrations.serve.service import ServeOptions, Service

    service = Service(
        artifact,
        ServeOptions(
            artifact.stem, parallel=1, queue=1, threads=threads, kv_cache=kv_cache, exact=exact, device=device,
            template=template,
        ),
    )  # fmt: skip
    try:
        if not service.prompts.has_template:
            raise UsageError(
                f"{artifact} has no chat template: give one by --chat-template, or use nstf generate"
            )
        if service.note is not None:
            sys.stderr.write(f"{clean(service.backend.name)}: {clean(service.note)}\n")
        Conversation(service, settings, stops, max_new_tokens, system).run()
    finally:
        service.close()


class Conversation:
    """What was said, and the loop that goes on with it."""

    def __init__(
        self,
        service: "Service",
        settings: "Settings",
        stops: tuple[str, ...],
        most: int | None,
        system: str | None,
    ) -> None:
        self._service, self._settings, self._stops, self._most = service, settings, stops, most
        self._system = system
        self._said: list[dict[str, Any]] = []
        self._terminal = sys.stdin.isatty()
        self._failed = False

    def run(self) -> None:
        """Until the input ends or /exit. Exit code 1 where a line of a file or a pipe had no answer."""
        self._loop()
        if self._failed and not self._terminal:
            raise typer.Exit(1)

    def _loop(self) -> None:
        if self._terminal:
            try:
                import readline  # noqa: F401  lines can be edited and called back
            except ImportError:
                pass
            sys.stderr.write(f"{HELP}\n")
        while True:
            try:
                line = input("> " if self._terminal else "")
                if line.strip() == "/exit":
                    return
                if any("\ud800" <= c <= "\udfff" for c in line):
                    self._fail("error: this line is not UTF-8 text")
                elif line.startswith("/"):
                    self._command(line.strip())
                elif line.strip():
                    self._reply(line)
            except EOFError:
                if self._terminal:
                    typer.echo("")
                return
            except KeyboardInterrupt:  # at the prompt, or just as an answer ended
                sys.stderr.write("\n/exit or Ctrl-D ends\n")

    def _fail(self, said: str) -> None:
        sys.stderr.write(f"{said}\n")
        self._failed = True

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._said.clear()
            sys.stderr.write("the conversation is forgotten\n")
        elif word == "/system":
            self._system = rest.strip() or None
            sys.stderr.write("the system message is set\n" if self._system else "no system message\n")
        else:
            sys.stderr.write(f"{HELP}\n" if word == "/help" else f"unknown command {clean(word)}; {HELP}\n")

    def _reply(self, text: str) -> None:
        """Prints an answer as it comes; the message is taken back where there is none."""
        from nstf.integrations.serve.errors import ApiError
        from nstf.integrations.serve.protocol import Request

        self._said.append({"role": "user", "content": text})
        first = [{"role": "system", "content": self._system}] if self._system else []
        pieces: Queue[Piece] = Queue()
        request = Request(
            first + self._said, "", self._most, self._settings, self._stops, True, False, None, None
        )
        try:
            answer = self._service.begin(request, pieces.put)
        except ApiError as error:
            self._said.pop()
            hint = "; /reset begins anew" if error.code == "context_length_exceeded" else ""
            self._fail(f"error: {clean(error)}{hint}")
            return
        written = []
        try:
            while True:
                piece = pieces.get()
                if piece.reason == "error":
                    self._fail(f"\nerror: {clean(piece.text)}")
                    break
                written.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                if piece.reason is not None:
                    break
        except KeyboardInterrupt:
            self._service.backend.cancel(answer)
            sys.stderr.write(" (stopped)")
        typer.echo("")
        if "".join(written).strip():
            self._said.append({"role": "assistant", "content": "".join(written)})
        else:
            self._said.pop()
