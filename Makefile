# Every target installs what it misses first (scripts/setup), as root or through sudo, and can be repeated.

CARGO ?= cargo
# Go and Rust where their own installers put them.
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

.PHONY: build demo test quick test-loaded soak bench install uninstall deb setup clean help

build: ## build kip, kip-keeper and kip-launch into target/release (the default)
	@scripts/setup build
	$(CARGO) build --release --locked

demo: ## the main job in half a minute: a web server parks, a page request brings it back
	@scripts/setup build run demo
	$(CARGO) build --release --locked
	@scripts/demo

test: ## every check and every test; what CI runs
	@scripts/setup build check
	$(CARGO) xtask test --setup

quick: ## once built in four minutes: build, checks, unit tests, a proc through each tier
	@scripts/setup build check
	$(CARGO) xtask test --setup build check units smoke

test-loaded: ## the same as test, with two busy threads beside the tests
	@scripts/setup build check
	$(CARGO) xtask test --setup --loaded

soak: ## the long runs: many cycles, many procs, faults at every step
	@scripts/setup
	$(CARGO) xtask test soak

bench: ## as root: first replies, throughput, memory, beside runc, plain CRIU and the papers; five hours
	@scripts/setup build run bench
	$(CARGO) build --release --locked
	$(CARGO) build --release --locked -p kip-sandbox --example start_latency
	bench/park-wake
	bench/hibernate
	bench/activeset
	bench/archive
	bench/sleepers
	bench/clones
	bench/light
	bench/ycsb
	bench/scaling
	bench/spawn
	bench/first-minutes

PREFIX ?= /usr/local

install: build ## as root: programs, manual pages, completion, systemd unit, into PREFIX (/usr/local); DESTDIR goes in front
	@test -n '$(DESTDIR)' || scripts/setup run
	@scripts/install --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

uninstall: ## as root: take them away again; data stay
	@scripts/install --uninstall --prefix '$(PREFIX)' --destdir '$(DESTDIR)'

deb: build ## a Debian package in target/
	@scripts/deb

setup: ## only install what is missing
	@scripts/setup

clean: ## remove what was built
	$(CARGO) clean
	rm -rf .kip

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
