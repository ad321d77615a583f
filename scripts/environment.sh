# The project's own environment, for the scripts beside this file: `ensure_environment EXTRAS` makes .venv when it is
# missing or out of date. In place it costs a few milliseconds; everything slow is in set_up.py.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"

# Is .venv finished, made from today's files and by a Python that is still there, and does it hold the extras?
environment_is_current() {
    local extras="$1" made_from made_with made_by extra
    [[ -x "$venv/bin/python" && -r "$venv/stamp" ]] || return 1
    IFS=$'\t' read -r made_from made_with made_by <"$venv/stamp" || return 1
    [[ "$made_from" == "$fingerprint" && "$made_by" == "$(readlink -f "$venv/bin/python")" ]] || return 1
    for extra in ${extras//,/ }; do
        [[ ",$made_with," == *",$extra,"* ]] || return 1
    done
}

# The first Python that is new enough and can make environments; says what is wrong when there is none.
find_python() {
    local candidate version too_old="" without_venv=""
    for candidate in ${MEGALAUNCH_PYTHON:+"$MEGALAUNCH_PYTHON"} python3 python3.13 python3.12 python3.11 python3.14; do
        version="$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || continue
        if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            too_old+="${too_old:+, }$candidate is $version"
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            without_venv="$candidate is Python $version without the modules venv and ensurepip; install them (Debian, Ubuntu: apt install python${version%.*}-venv)"
        else
            echo "$candidate"
            return
        fi
    done
    if [[ -n "$without_venv" ]]; then
        echo "megalaunch: $without_venv, or name another Python: MEGALAUNCH_PYTHON=/path/to/python3" >&2
    else
        echo "megalaunch: needs Python 3.11 or newer, and found ${too_old:-no python3}; install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: MEGALAUNCH_PYTHON=/path/to/python3" >&2
    fi
    return 1
}

ensure_environment() {
    local extras="$1" python
    fingerprint="$(cd "$root" && { echo "$root"; cat pyproject.toml constraints.txt; } | sha256sum)" || exit 1
    fingerprint="${fingerprint%% *}"
    environment_is_current "$extras" && return
    python="$(find_python)" || exit 1
    "$python" "$root/scripts/set_up.py" "$root" "$extras" "$fingerprint" || exit 1
}
