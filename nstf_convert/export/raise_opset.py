"""Raises an ONNX model to another opset: a program that reads the model from stdin and writes it to stdout.

    python raise_opset.py OPSET < old.onnx > new.onnx

The converter of the package onnx is C++ that takes a graph for a right one: of some that are not it reads what is not there,
which ends the process. So it has one of its own. The last line of stderr says what it does not convert, with exit code 1.
"""

import os
import sys

# The exit code where memory ended.
NO_MEMORY = 3


def main() -> None:
    import onnx

    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no part of the model
    model = onnx.load_model_from_string(sys.stdin.buffer.read())
    try:
        raised = onnx.version_converter.convert_version(model, int(sys.argv[1])).SerializeToString()
    except MemoryError:
        sys.exit(NO_MEMORY)
    except Exception as error:  # it raises several types, and says which operator it does not know
        sys.exit(" ".join(str(error).split())[:160])
    with os.fdopen(out, "wb") as file:
        file.write(raised)


if __name__ == "__main__":
    main()
