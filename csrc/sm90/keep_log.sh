# Runs a compiler and keeps what it says in a file beside the object, because ninja prints the output of a compilation
# once and never again: .ci/ptxas.py reads registers and spills from there. Called by CMake: sh keep_log.sh nvcc ...
log= previous=
for argument do
  [ "$previous" = -o ] && log=$argument.log
  previous=$argument
done
[ -n "$log" ] || exec "$@"
"$@" >"$log" 2>&1
status=$?
cat "$log"
[ $status -eq 0 ] || rm -f "$log"
exit $status
