"""A llama.cpp server from the Python package xllamacpp. Runs in that package's environment: standard library and it.

python llama_cpp_answers.py MODEL.gguf CONTEXT CACHE_TYPE    prints the address, serves until its standard input closes
"""

import json
import sys


def main(model: str, context: str, cache_type: str) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = int(context)
    parameters.n_parallel = 1
    parameters.use_jinja = True
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = getattr(xllamacpp.ggml_type, cache_type)
    server = xllamacpp.Server(parameters)
    address = server.listening_address
    print(json.dumps({"address": address, "version": xllamacpp.__version__}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
