# Environments of single tools, for the scripts beside this file: `ensure_tools NAME` makes build/tools/NAME from
# scripts/requirements/NAME.txt, exact versions, when that file or the Python has changed. They hold no megalaunch.

ensure_tools() {
    local name="$1" python stamp
    tools="$root/build/tools/$name"
    stamp="$(sha256sum <"$root/scripts/requirements/$name.txt")"
    [[ -x "$tools/bin/python" && "$(cat "$tools/stamp" 2>/dev/null)" == "$stamp" ]] && return
    python="$(find_python)" || exit 1
    echo "megalaunch: making build/tools/$name with pip" >&2
    rm -rf "$tools"
    "$python" -m venv "$tools" || exit 1
    "$tools/bin/python" -m pip install -q --disable-pip-version-check -r "$root/scripts/requirements/$name.txt" || exit 1
    echo "$stamp" >"$tools/stamp"
}
