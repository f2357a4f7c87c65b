# What a user and a developer type; `make help` lists it. The work is in scripts/ (scripts/README.md).

.DEFAULT_GOAL := build
.PHONY: help build test sim sim-mutants model demo soak ct bench fuzz coverage dist cluster clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | sed 's/\$$\$$/$$/g' | expand -t 14

build: ## native library and Erlang modules, put together
	scripts/dist

test: ## everything that CI runs; STAGES="rust ct" for some of it
	scripts/test $(STAGES)

sim: ## seeded simulation of both machines; SEEDS=10000 STEPS=5000 FROM=1; on failure the seed and a shrunk trace
	scripts/sim

model: ## every order of events of two writers, within bounds: how many states, and that nothing breaks in any
	scripts/sim --model

sim-mutants: ## deliberate mistakes of the core, and which seed finds each
	scripts/sim --mutants

demo: ## publish, watch local disk shrink and objects grow, read back, compare; KEEP=1 leaves it running
	scripts/demo

soak: dist ## random faults on three nodes with the checker of histories on; MINUTES=10 SEED=n, ONLY="fault fault" for some
	MINUTES=$(or $(MINUTES),10) scripts/soak

ct: dist ## Common Test; SUITE=reader for one (test/README.md); SUITE=cluster: three nodes and their faults (end-to-end tests)
	scripts/ct $(SUITE)

fuzz: ## mutated bytes against every decoder; SECONDS=60 for each, TARGET=root for one
	scripts/fuzz --seconds $(or $(filter-out 0,$(value SECONDS)),60) $(TARGET)

coverage: ## which lines of the two lower crates their tests run
	scripts/coverage

bench: ## a table and JSON lines, about twenty minutes; ROWS="read share" for some (docs/BENCHMARKS.md)
	scripts/bench $(ROWS)

dist: ## the .ez to install: dist/rabbitmq_stream_s3-VSN.ez
	scripts/dist --ez

cluster: build ## three nodes to play with; stop with: scripts/node --dir $$(scripts/cluster --dir) wipe --all
	scripts/cluster

clean: ## what was built from this checkout (not the shared cache of downloads)
	scripts/clean
