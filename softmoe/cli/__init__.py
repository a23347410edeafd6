"""The command line: `softmoe COMMAND ...`. Each command parses, calls one function and prints."""

import _thread
import difflib
import io
import os
import re
import signal
import sys
import threading
from importlib import import_module
from typing import Any

GROUPS = {
    "Start here": {
        "demo": "a small trained model that comes with the package: what it predicts, and what is inside it",
        "quickstart": "train a small Soft MoE, its controls and its dense twin, and compare them",
        "train": "train a model from a recipe: softmoe train small_data --data photos",
        "finetune": "train a saved model on other classes, at any image size",
        "predict": "the likeliest classes of images in files",
        "evaluate": "accuracy, confusions and the worst photos of a saved model",
        "inspect": "what the routers of a model do, as figures and as a page",
        "doctor": "what is wrong with a model or a run, in plain words",
    },
    "Models from models": {
        "upcycle": "make a model with experts from a dense one",
        "soup": "average the weights of several fine-tuned models",
        "export": "write a model as a file that runs without softmoe",
        "upload": "put a model on the Hugging Face Hub, with its card",
        "serve": "answer images over HTTP with classes or embeddings",
    },
    "Measure": {
        "fewshot": "how well a few examples of each class tell the classes apart",
        "report": "one page for one or several runs",
        "sweep": "a run for each combination of values, and one table: softmoe sweep small_data lr=1e-3,3e-3",
        "study": "one of the paper's experiments: runs, figure and verdict",
        "cost": "parameters, FLOPs and the paper's cost columns, before anything runs",
        "plan": "memory, traffic and step time on many devices, before any hardware exists",
        "bench": "time the layer and the models against the machine's roofline",
        "selftest": "is this machine right, and how fast is it: one page to attach to an issue",
    },
    "Images and texts": {
        "search": "the images that a sentence describes best, as a page",
        "zeroshot": "accuracy of two towers that know the classes by name only",
        "retrieve": "the right captions for images and the right image for captions, recall at 1, 5, 10",
        "tokenizer": "learn a tokenizer from captions",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
FILES = {
    "cost": ("bench", "cost", "plan", "selftest"),
    "deploy": ("export", "serve", "upload"),
    "evaluate": ("doctor", "evaluate", "fewshot", "inspect", "predict"),
    "experiments": ("demo", "quickstart", "report", "study", "sweep"),
    "texts": ("retrieve", "search", "tokenizer", "zeroshot"),
    "train": ("train",),
    "transfer": ("finetune", "soup", "upcycle"),
}

LESS_MEMORY = (
    "Take fewer images at a time (--batch-size); in training --accumulate 2 computes a batch in two parts, "
    "--activation-gb 8 computes blocks twice until the rest fits, --optim.states bfloat16 halves the optimizer's memory"
)


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user's mistake ends in one line on stderr and exit code 2, never in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    if argv is None:
        sys.unraisablehook = interrupt_again
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it is while the command starts
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]  # as it is where it was closed
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:  # also of a torch for which there is no memory
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, ImportError) as error:
        return fail(str(error))
    except re.error as error:
        return fail(f"{error.pattern!r} is not a pattern: {error}")
    except RecursionError:
        return fail("something in the input is nested too deeply")
    except MemoryError:
        return fail("there is not enough memory for this")
    except OverflowError:
        return fail("one of the numbers is too large")
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            return fail(f"{'. '.join(str(error).split('. ')[:3])}. {LESS_MEMORY}")
        if "can't allocate memory" in str(error):
            return fail(f"there is not enough memory for this. {LESS_MEMORY}")
        if "home directory" not in str(error):  # of a path such as ~nobody/x
            raise
        return fail(str(error))


def run(argv: list[str]) -> int:
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name in ("--version", "version"):
        from softmoe import __version__

        print(f"softmoe {__version__}")
        return 0
    if name not in COMMANDS:
        near = ["--version"] if name in ("-v", "-V") else difflib.get_close_matches(name.lower(), COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f"; commands are: {', '.join(COMMANDS)}"
        return fail(f"unknown command {name!r}{hint}")
    file = next(file for file, commands in FILES.items() if name in commands)
    return getattr(import_module(f"softmoe.cli.{file}"), f"{name}_command")(rest)


def interrupt_again(lost: Any) -> None:
    """Repeat a Ctrl-C a moment later that came where Python can only print it: within a callback of an import."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def interrupt_main() -> None:
    """Interrupt the main thread as Ctrl-C does, also where it waits for something (not on Windows)."""
    main_thread = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main_thread is not None:
        signal.pthread_kill(main_thread, signal.SIGINT)
    else:
        _thread.interrupt_main()


def fail(message: str) -> int:
    """Say what is wrong. Of a very long word that the message quotes, a name for example, the middle is left out."""
    if len(message) > 4000:
        message = f"{message[:2000]} ... {message[-1000:]}"
    print(f"softmoe: error: {message}", file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: softmoe COMMAND [--help] ...", "", "Soft Mixture-of-Experts vision transformers."]
    for title, commands in GROUPS.items():
        lines += ["", title, *(f"  {name:<{width}}  {what}" for name, what in commands.items())]
    return "\n".join(lines)
