#!/bin/sh
# What a container of compose.cluster.yaml runs, as one machine of a cluster:
#
#   cluster.sh head MODEL MACHINES    begins the cluster, and serves when so many machines are there
#   cluster.sh join HEAD:PORT         is one of its machines
#
# Each ends when the cluster ends here, and is started again by Docker. The key is a file that this
# user alone can read: it is in no command line.
set -eu
key=/run/secrets/cluster_key
folder=$XDG_STATE_HOME/quire/cluster
trap 'exit 143' TERM INT
trap 'quire cluster stop' EXIT

machines() {
  quire cluster status | sed -n 's/^machines: //p' | tr ',' '\n' | wc -l
}

case $1 in
head)
  install -D --mode=600 "$key" "$folder/key"
  quire cluster start
  # Serving begins with the machines that are there, and with no others.
  until [ "$(machines)" -ge "$3" ]; do sleep 1; done
  quire cluster serve "$2" --replicas "$3" &
  serving=$!
  trap 'kill -TERM $serving' TERM INT
  code=0
  wait $serving || code=$?
  # A signal ends the waiting, and not what is waited for.
  while kill -0 $serving 2> /dev/null; do
    code=0
    wait $serving || code=$?
  done
  exit $code
  ;;
join)
  quire cluster join "$2" --key-file "$key"
  pid=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' "$folder/node.json")
  while kill -0 "$pid" 2> /dev/null; do sleep 1; done
  exit 1
  ;;
*)
  echo "cluster.sh head MODEL MACHINES | join HEAD:PORT" >&2
  exit 2
  ;;
esac
