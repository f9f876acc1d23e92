# Verbflow. `make help` lists the targets. The first target that needs it makes the virtual environment.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
export PYTHONDONTWRITEBYTECODE := 1

NAME ?= smoke
PROFILE ?=
# A service's code, and messages alone (with type stubs).
PROTO_SERVICES := runtime/cluster/proto/*.proto
PROTO_MESSAGES := runtime/transport/grpc/*.proto
quote = '$(subst ','\'',$(1))'

.PHONY: help setup venv experiment paper smoke plan report doctor notebook ci-rxe instrument peers test test-torch test-rxe rxe rxe-shell lint proto proto-check constraints

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

venv:
	@bash harness/setup.sh venv

setup: ## virtual environment, the distribution's pyverbs, packages for soft-RoCE
	@bash harness/setup.sh apt
	@bash harness/setup.sh venv

experiment: setup ## run one, or continue it where it was interrupted: make experiment NAME=alexnet_rdma [PROFILE=quick]
	@$(PYTHON) -m harness.cli run $(call quote,$(NAME)) $(if $(PROFILE),--profile $(call quote,$(PROFILE))) --resume

paper: venv ## the paper's figures and claims: measure, judge, rebuild the notebook; PROFILE=quick is the short form
	@$(PYTHON) -m harness.cli paper $(if $(PROFILE),--profile $(call quote,$(PROFILE)))

smoke: venv ## every transport that this machine can use, in under a minute
	@$(PYTHON) -m harness.cli run smoke

plan: venv ## what an experiment will measure, and how long it will take: make plan NAME=transfer
	@$(PYTHON) -m harness.cli plan $(call quote,$(NAME)) $(if $(PROFILE),--profile $(call quote,$(PROFILE)))

report: venv ## tables, pictures and HTML page of an experiment's newest run: make report NAME=smoke
	@$(PYTHON) -m harness.cli report $(call quote,$(NAME))

doctor: venv ## what can run here, what cannot, and what would change it
	@$(PYTHON) -m harness.cli doctor

notebook: venv ## the notebooks, in JupyterLab
	@$(PYTHON) -m jupyterlab notebooks

ci-rxe: setup ## RDMA against TCP on soft-RoCE, quickly, its ratios checked against bands
	@$(PYTHON) -m harness.cli run alexnet_rdma --profile quick --check

instrument: venv ## does the harness see differences that are there, and none that are not? (5 to 30 minutes)
	@$(PYTHON) -m harness.analysis.instrument

peers: venv ## a second environment with PyTorch and TensorFlow, for the benchmarks beside them
	@bash harness/setup.sh peers torch tensorflow

lint: venv ## style (ruff) and types (mypy)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy runtime harness

test: setup ## everything: lint, types, drift check, native tests, tests in the soft-RoCE guest
	@$(MAKE) --no-print-directory lint proto-check
	$(PYTHON) -m pytest
	@$(MAKE) --no-print-directory test-torch
	@$(MAKE) --no-print-directory test-rxe

# A file is named, because collecting the others would need all of the product's libraries.
test-torch: venv ## whole models' gradients against PyTorch, in an environment that has it
	@bash harness/setup.sh peers
	@if [ -e .venv-peers/.complete ]; then \
	    .venv-peers/bin/python -m pytest -q -m torch -p no:cacheprovider runtime/tests/test_torch_parity.py; \
	else echo "test-torch: skipped, PyTorch could not be installed: $$(tail -n 1 .venv-peers/.missing)"; fi

# Files are named, so that a slow guest need not import every other test's libraries.
RXE_CONTRACT = runtime/tests/test_contract.py runtime/tests/test_verbs_link.py
RXE_OTHERS = $$(grep -lr 'mark\.rxe' --include='test_*.py' runtime/tests harness/tests | grep -v verbs_link)
RXE_PYTEST = $(PYTHON) -m pytest -p no:cacheprovider

test-rxe: setup ## tests that need an RDMA device; boots the soft-RoCE guest where this machine has none
	@$(PYTHON) -m harness.launch.vm --skip --timeout 1800 -- bash -c "\
	    VERBFLOW_CONTRACT_TRANSPORTS=verbs VERBFLOW_CONTRACT_BYTES=67108864 $(RXE_PYTEST) $(RXE_CONTRACT) && \
	    $(RXE_PYTEST) -m rxe $(RXE_OTHERS)"

rxe-shell: setup ## interactive shell with an RDMA device
	@$(PYTHON) -m harness.launch.vm

rxe: setup ## one command with an RDMA device: make rxe CMD='ibv_devinfo -v'
	@$(PYTHON) -m harness.launch.vm -- bash -c $(call quote,$(CMD))

define protoc
$(PYTHON) -m grpc_tools.protoc -I . --python_out=$(1) --grpc_python_out=$(1) $(PROTO_SERVICES) && \
$(PYTHON) -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) $(PROTO_MESSAGES)
endef

proto: venv ## generate the protobuf code that is committed
	cd $(CURDIR) && $(call protoc,.)

proto-check: venv ## the committed protobuf code is what the .proto files generate
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(call protoc,"$$scratch") && \
	for file in $$(cd "$$scratch" && find . -name '*_pb2*.py*'); do \
	    cmp "$$scratch/$$file" "$$file" || { echo "run make proto: $$file is stale"; exit 1; }; done

constraints: venv ## refresh constraints.txt from the installed versions
	@{ head -1 constraints.txt; $(PYTHON) -m pip freeze --exclude-editable | grep -viE '^(torch|tensorflow|mpi4py|ibverbs)'; } > constraints.new && mv constraints.new constraints.txt
