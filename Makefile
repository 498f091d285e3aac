# The book and its library. `make help` lists the commands.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BOOK   := _build/html
PORT   ?= 8000
NB     ?=
PART   ?=
ROUNDS ?= 9
export PYTHONPATH :=

.PHONY: help book pdf lighthouse serve run new lint quick test slow bench gpu clean
help: ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# Installing is slow, so it happens once for each change of what is to be installed.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/book.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[book]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[book,test]'
	@touch $@ $(VENV)/book.stamp

book: $(VENV)/book.stamp ## render the book from the stored outputs
	$(BIN)/jupyter-book build . -q
	$(BIN)/python -m tools.plain --out $(BOOK)/plain
	@echo "The book: file://$(CURDIR)/$(BOOK)/index.html   (make serve: http://localhost:$(PORT))"

$(VENV)/pdf.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[book,pdf]'
	@touch $@

pdf: book $(VENV)/pdf.stamp ## print the book into _build/pdf/attnlib.pdf, with Chromium
	$(BIN)/python -m tools.pdf

lighthouse: book ## Lighthouse on the first page and the heaviest chapters, on a quiet machine; needs npx and Chrome
	npx --yes @lhci/cli@0.15 autorun --config=tools/lighthouserc.json

serve: book ## render the book and serve it on localhost
	$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory $(BOOK)

run: $(VENV)/test.stamp ## export, execute notebooks in place, clean them; NB=10_attention for one
	$(BIN)/nbdev-export
	$(BIN)/python -m tools.notebooks run $(NB)
	$(BIN)/python -m tools.readme

new: $(VENV)/test.stamp ## copy the template of a chapter: NB=56_name
	$(BIN)/python -m tools.new $(NB)

lint: $(VENV)/test.stamp ## the rules that need no run: ruff, and notebooks as `make run` leaves them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.notebooks check

quick: $(VENV)/test.stamp ## ruff, a parity test per model, and the tests and notebooks that a change may break
	$(BIN)/python -m tools.quick

test: lint ## everything: rules, library, notebooks, book, browser; two or more at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --ignore tests/test_browser.py
	$(BIN)/python -m tools.notebooks test --book $(NB)

slow: book $(VENV)/test.stamp ## the tests that `make test` leaves out: long scripts, every kernel case, every page on a screen
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m slow

bench: $(VENV)/test.stamp ## time the library beside its peers and record the results; on a quiet machine; ROUNDS=2 for a look
	$(BIN)/python -m benchmarks.attention speed --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.transformer speed --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.vision --models vit_small_patch16_224 --name vit --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.vision --models swin_tiny_patch4_window7_224 --name swin --batch 4 --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.vision --models swinv2_tiny_window8_256 --name swinv2 --batch 4 --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.vision --models tnt_s_patch16_224 --name tnt --batch 4 --repeats $(ROUNDS) --out benchmarks/results
	$(BIN)/python -m benchmarks.inference speed --repeats $(ROUNDS) --compile --out benchmarks/results

gpu: ## on a CUDA machine, with its own PyTorch and no network: check, time and record everything; PART=swin for a part
	$(PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART))

clean: ## remove the environment and everything built
	rm -rf $(VENV) _build build dist *.egg-info
