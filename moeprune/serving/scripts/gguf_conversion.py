"""llama.cpp's own converter, told which pre-tokenizer a vocabulary has that it does not know by its hash.

python gguf_conversion.py LLAMA_CPP_DIRECTORY PRE_TOKENIZER CONVERTER_ARGUMENT...

Where the converter knows the vocabulary its own answer stands. Runs in a Python with the converter's requirements.
"""

import importlib
import sys
from typing import Any


def main(directory: str, pre_tokenizer: str, *arguments: str) -> None:
    sys.path.insert(0, directory)
    converter = importlib.import_module("convert_hf_to_gguf")
    for owner in _owners(converter):
        owner.get_vocab_base_pre = _with_fallback(owner.get_vocab_base_pre, pre_tokenizer)
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    converter.main()


def _owners(converter: Any) -> list[Any]:
    """The classes that define the look-up: in one file in older releases, in a package in newer ones."""
    modules = [converter, *(module for name, module in sys.modules.items() if name.startswith("conversion"))]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    owners = [owner for owner in classes if "get_vocab_base_pre" in vars(owner)]
    if not owners:
        sys.exit("this converter has no get_vocab_base_pre; the pre-tokenizer cannot be given to it")
    return owners


def _with_fallback(known: Any, pre_tokenizer: str) -> Any:
    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return pre_tokenizer

    return get_vocab_base_pre


if __name__ == "__main__":
    main(*sys.argv[1:])
