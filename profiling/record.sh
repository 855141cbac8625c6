#!/usr/bin/env bash
# Profiles one vLLM worker under load with Nsight Systems; prints the path of the sqlite export last.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: profiling/record.sh prefill|decode --model MODEL [options] [-- more vllm serve arguments]

  --out DIR        where the capture goes           (default: profile-out)
  --baseline       the same load without ELDR, for the audit's --baseline
  --from-start     record from process start, CUDA graph capture included; a larger file, but replays
                   can then be mapped to their capture
  --requests N     requests of the load             (default: 200)
  --concurrency N  requests at a time               (default: 8 for prefill, 64 for decode)
  --port N         port of the worker               (default: 8190)
  --wait SECONDS   for the worker to come up        (default: 900)
  --dry-run        print the commands, run nothing

prefill: long prompts, one token, each asking for its signature. decode: short prompts, long answers; the
worker's counters are polled into DIR/decode.jsonl for the report. The export holds the environment of the
process: treat the file as confidential. exit codes: 0 done, 1 failed, 2 usage, 3 nsys or vllm is missing
TEXT
}

fail() { echo "record.sh: $2" >&2; exit "$1"; }

[[ $# -gt 0 ]] || { usage >&2; exit 2; }
role=$1; shift
case $role in
  prefill) input=1024 output=1 concurrency=8 ;;
  decode) input=32 output=256 concurrency=64 ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; fail 2 "expected prefill or decode, got '$role'" ;;
esac

model='' out=profile-out requests=200 port=8190 patience=900 baseline='' from_start='' dry=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --model | --out | --requests | --concurrency | --port | --wait)
      [[ $# -gt 1 ]] || fail 2 "$1 needs a value"
      case $1 in
        --model) model=$2 ;;
        --out) out=$2 ;;
        --requests) requests=$2 ;;
        --concurrency) concurrency=$2 ;;
        --port) port=$2 ;;
        --wait) patience=$2 ;;
      esac
      shift 2 ;;
    --baseline) baseline=1; shift ;;
    --from-start) from_start=1; shift ;;
    --dry-run) dry=1; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; fail 2 "unknown option '$1'" ;;
  esac
done
[[ -n $model ]] || fail 2 "--model is missing"
for number in "$requests" "$concurrency" "$port" "$patience"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || fail 2 "expected a positive number, got '$number'"
done

name=$role${baseline:+-baseline}
capture=$out/$name
url=http://127.0.0.1:$port
python=${PYTHON:-python3}

environment=(VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_NVTX_SCOPES_FOR_PROFILING=1)
server=(vllm serve "$model" --port "$port" --profiler-config '{"profiler": "cuda"}')
load=(vllm bench serve --profile --backend openai --base-url "$url" --model "$model"
  --dataset-name random --random-input-len "$input" --random-output-len "$output" --ignore-eos
  --num-prompts "$requests" --max-concurrency "$concurrency")
if [[ -n $baseline ]]; then
  environment+=(ELDR_NVTX=0)
else
  environment+=(ELDR_NVTX=1)
  server+=(--additional-config "{\"eldr\": {\"role\": \"$role\"}}")
  if [[ $role == prefill ]]; then
    load+=(--extra-body '{"kv_transfer_params": {"eldr": {"counts": true}}}')
  fi
fi
server+=("$@")

record=(nsys profile -o "$capture" --force-overwrite=true -t cuda,nvtx --sample=none --cpuctxsw=none
  --trace-fork-before-exec=true --cuda-graph-trace=node)
# Without a range everything is recorded; with it, what vLLM's profiler routes start and stop.
[[ -n $from_start ]] || record+=(-c cudaProfilerApi --capture-range-end=stop)
export_command=(nsys export --type sqlite --force-overwrite=true -o "$capture.sqlite" "$capture.nsys-rep")

show() { printf '%q ' "$@"; printf '\n'; }
if [[ -n $dry ]]; then
  show env "${environment[@]}" "${record[@]}" "${server[@]}"
  show "${load[@]}"
  show "${export_command[@]}"
  echo "$capture.sqlite"
  exit 0
fi
for tool in nsys vllm "$python"; do
  command -v "$tool" > /dev/null || fail 3 "$tool is not on PATH"
done

mkdir -p "$out"
log=$capture.log
profiler='' poller=''
stop() {
  [[ -z $poller ]] || kill "$poller" 2> /dev/null || true
  [[ -z $profiler ]] || close_capture
}

# Nsight ends the worker and writes its report on SIGINT, which can take minutes; what is still there
# after that time is killed.
close_capture() {
  kill -INT "$profiler" 2> /dev/null || true
  for ((left = 10 * patience; left > 0; left--)); do
    kill -0 "$profiler" 2> /dev/null || break
    sleep 0.1
  done
  kill -KILL -- "-$profiler" 2> /dev/null || true
  wait "$profiler" 2> /dev/null || true
  profiler=''
}
trap stop EXIT
trap 'exit 130' INT TERM

fetch() { "$python" -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"; }

# A job of its own, so that Ctrl-C reaches it only through us.
set -m
env "${environment[@]}" "${record[@]}" "${server[@]}" > "$log" 2>&1 &
profiler=$!
set +m
echo "record.sh: waiting for the worker (log: $log)" >&2
for ((waited = 0; ; waited++)); do
  fetch "$url/health" > /dev/null 2>&1 && break
  kill -0 "$profiler" 2> /dev/null || { tail -n 5 "$log" >&2; fail 1 "the worker ended, see $log"; }
  ((waited < patience)) || { tail -n 5 "$log" >&2; fail 1 "no worker after $patience s, see $log"; }
  sleep 1
done

if [[ $role == decode && -z $baseline ]]; then
  : > "$out/decode.jsonl"
  (while sleep 1; do fetch "$url/eldr/decode" >> "$out/decode.jsonl" 2> /dev/null || true; done) &
  poller=$!
fi
echo "record.sh: sending $requests requests" >&2
"${load[@]}" >&2 || fail 1 "the load failed, see above and $log"
[[ -z $poller ]] || { kill "$poller" 2> /dev/null || true; poller=''; }

echo "record.sh: closing the capture" >&2
close_capture
[[ -s $capture.nsys-rep ]] || fail 1 "nsys wrote no $capture.nsys-rep, see $log"
"${export_command[@]}" >&2 || fail 1 "the export failed"
echo "$capture.sqlite"
