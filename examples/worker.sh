#!/bin/sh
# A Towpath worker in POSIX shell with curl: sh worker.sh URL QUEUE NAME
set -u
export LC_ALL=C
url=$1 queue=$2 name=$3 stopping=
trap 'stopping=yes' TERM

# post PATH JSON: every call is safe to repeat, so curl may try again.
post() {
    curl -fsS --retry 9 --retry-delay 1 --retry-connrefused -H 'Content-Type: application/json' -d "$2" "$url$1"
}

# field NAME JSON: the first string of that name. Enough here: no value has a quote in it.
field() {
    printf '%s' "$2" | awk -F '"' -v name="$1" '{ for (i = 2; i < NF; i += 2) if ($i == name) { print $(i + 2); exit } }'
}

# measure_file PATH: wc skips what it can't print, so every byte that is no white space becomes an x.
measure_file() {
    [ -r "$1" ] || return 1
    printf '{"sha256": "%.64s", "words": %d}' "$(sha256sum <"$1")" "$(tr -c '[:space:]' '[x*]' <"$1" | wc -w)"
}

while [ -z "$stopping" ]; do
    # Only the kind that it can do. One short job at a time needs no heartbeat: the lease is long enough.
    claim=$(post /v1/claims '{"queues": ["'"$queue"'"], "kinds": ["measure_file"], "worker": "'"$name"'",
        "wait_seconds": 3, "lease_seconds": 15}')
    id=$(field id "$claim") lease=$(field lease "$claim")
    if [ -z "$id" ]; then
        sleep 1
    elif [ -n "$stopping" ]; then
        post "/v1/jobs/$id/release" '{"lease": "'"$lease"'"}'
    elif result=$(measure_file "$(field path "$claim")"); then
        post "/v1/jobs/$id/complete" '{"lease": "'"$lease"'", "result": '"$result"'}'
    else
        post "/v1/jobs/$id/retry" '{"lease": "'"$lease"'", "error": {"message": "cannot read the file"}}'
    fi >/dev/null
done
