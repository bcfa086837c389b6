# Sourced by the scripts here: aligned lines for people, root through sudo, the machine's own facts.
# shellcheck shell=bash

# say GROUP WHAT RESULT...: one aligned line.
say() { printf '  %-7s %-26s %s\n' "$1" "$2" "${*:3}"; }

# refuse LINE: what was wrong and what to do, on stderr; ends the script.
refuse() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# as_root COMMAND ARGS: as it is for root, else through sudo, with the machine's proxy settings.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo --preserve-env=http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY "$@"
    else
        refuse "'${1##*/}' needs root, and there is no sudo: run this as root, or install sudo"
    fi
}

# version_at_least FOUND WANTED: compares dotted numbers.
version_at_least() { [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# apt's version of a package that could be installed; empty when there is none.
apt_candidate() { LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p' | grep -vxF '(none)'; }

require_apt() {
    command -v apt-get >/dev/null || refuse "this needs apt (Debian 12 or later, Ubuntu 24.04 or later);" \
        "elsewhere install by hand what 'scripts/setup --check' lists"
}
