//! The table of limits in docs/SECURITY.md states each number as it is in the code, and each limit of a reader of bytes
//! from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The rows of the table, each with the file and the name of its number.
const LIMITS: &str = "
store: a key | runtime/core/src/store/tcp/protocol.rs | MAX_KEY
store: a value | runtime/core/src/store/tcp/protocol.rs | MAX_VALUE
store: keys in one request | runtime/core/src/store/tcp/protocol.rs | MAX_KEYS
store: one request, one reply | runtime/core/src/store/tcp/protocol.rs | MAX_MESSAGE
store: keys, values and waits together | runtime/core/src/store/tcp/access.rs | stored_bytes
store: keys | runtime/core/src/store/tcp/access.rs | stored_keys
store: unfinished requests of all clients | runtime/core/src/store/tcp/access.rs | unfinished_bytes
store: clients of one host with an unfinished request | runtime/core/src/store/tcp/access.rs | unfinished_per_host
store: unread replies | runtime/core/src/store/tcp/access.rs | unread_bytes
store: connections | runtime/core/src/store/tcp/access.rs | connections
store: connections without a proof | runtime/core/src/store/tcp/access.rs | unproved
store: time for one request | runtime/core/src/store/tcp/access.rs | request_time
store: time for the proof | runtime/core/src/store/tcp/access.rs | proof_time
store of another: a string that it sends | runtime/core/src/store/tcp/client.rs | MAX_STRING
store of another: the reason of a refusal | runtime/core/src/store/tcp/client.rs | MAX_REASON
store of a C program: a value | runtime/capi/src/store.rs | MAX_VALUE_BYTES
data port: connections that have not proved the secret | runtime/cpu/src/mesh/listener.rs | MAX_HANDSHAKES
data port: such connections of one host, before the oldest goes for the next | runtime/cpu/src/mesh/listener.rs | MAX_OF_HOST
data port: time before one goes for another | runtime/cpu/src/mesh/listener.rs | LEAST_TIME
data port: time for the proof | runtime/cpu/src/mesh/listener.rs | HANDSHAKE_TIME
addresses of one rank for data connections | runtime/cpu/src/mesh/address.rs | MAX_ADDRESSES
messages of one peer that no receive has taken (CPU backend) | runtime/cpu/src/p2p/channel.rs | MAX_KEPT_BYTES
a message that a peer sends without an offer (CPU backend) | runtime/cpu/src/p2p/frame.rs | MAX_EAGER_BYTES
an object of an object collective, as JSON | runtime/core/src/group/objects/encoding.rs | MAX_OBJECT_BYTES
the text of a world that is recreated | runtime/core/src/world/round.rs | MAX_BYTES
the file of `RCOMM_TUNING_FILE` | runtime/core/src/config/mod.rs | MAX_TABLE_BYTES
a file of the TLS identity (what follows is ignored) | recorder/src/publish/tls/files.rs | MAX_FILE
NCCL's RAS report that a rank reads | runtime/nccl/src/context/ras.rs | MAX_BYTES
`rcomm-run`: launchers of one job | runtime/tools/src/launch/rounds.rs | MAX_LAUNCHERS
endpoint: connections served at a time | recorder/src/publish/endpoint.rs | MAX_CONNECTIONS
endpoint: connections of one host without an admitted request | recorder/src/publish/endpoint.rs | STRANGERS_PER_HOST
endpoint: time for the head of a request | recorder/src/publish/endpoint.rs | HEADER_TIME
endpoint: time for one connection | recorder/src/publish/endpoint.rs | CONNECTION_TIME
endpoint: time for which a request may wait for its turn | recorder/src/publish/share.rs | LONGEST_WAIT
endpoint: handlers of the program | recorder/src/publish/handlers.rs | MAX_HANDLERS
answer of an endpoint or of `--worker-server`: head | recorder/src/publish/http.rs | MAX_HEAD
answer of an endpoint or of `--worker-server`: body | recorder/src/publish/http.rs | MAX_BODY
answers of all endpoints in one live look | analyzer/src/live/source/network/endpoints.rs | MOST_ANSWERED
threads that an endpoint lists | recorder/src/publish/threads.rs | MAX_THREADS
a launch record | recorder/src/publish/launch_record.rs | MAX_BYTES
launch records of a job together | recorder/src/publish/launch_record.rs | MAX_SUM
launch records of a job | recorder/src/publish/launch_record.rs | MAX_FILES
a ring | recorder/src/publish/ring_reader.rs | MAX_BYTES
`rcomm-web`: connections (`--max-connections`) | web/src/http/limits.rs | connections
`rcomm-web`: connections of one host without an admitted request | web/src/http/limits.rs | strangers_per_host
`rcomm-web`: time for the head of a request | web/src/http/limits.rs | head
`rcomm-web`: time until an answer begins | web/src/http/limits.rs | answer
`rcomm-web`: time for which an answer may stay unread | web/src/http/limits.rs | idle_timeout
`rcomm-web`: an upload, packed or not | web/src/http/limits.rs | upload
`rcomm-web`: the address of a request | web/src/serve/routes.rs | MAX_URI
`rcomm-web`: the body of a request that is no upload | web/src/serve/routes.rs | MAX_BODY
`rcomm-web`: the form of an upload, without its files | web/src/serve/routes.rs | MAX_FORM_OVERHEAD
`rcomm-web`: files of an upload | web/src/api/uploaded.rs | MAX_FILES
`rcomm-web`: operations of an upload | web/src/api/uploaded.rs | MAX_ENTRIES
`rcomm-web`: uploads that are kept | web/src/api/uploaded.rs | MAX_KEPT
`rcomm-web`: the answer of a node | web/src/nodes/mod.rs | MAX_BYTES
a file that is read, unpacked (`rcomm-fr`) | analyzer/src/input/load/mod.rs | max_file_bytes
all packed files together, unpacked (`rcomm-fr`) | analyzer/src/input/load/mod.rs | max_unpacked
a file that is read beside others, unpacked | analyzer/src/input/load/sums.rs | LARGE_FILE
archives within each other | analyzer/src/input/load/unpack.rs | MAX_DEPTH
folders within each other | analyzer/src/input/load/walk.rs | MAX_DEPTH
a pickle: values | recorder/src/publish/pickle/graph.rs | MAX_CELLS
a pickle: shapes, types and frames of all operations | recorder/src/publish/dialect/read_pickle/mod.rs | MAX_WALKED
a dump: links to peers | recorder/src/publish/dialect/value.rs | MAX_PEERS
a dump: failures | recorder/src/publish/dialect/value.rs | MAX_FAILURES
a dump: steps of a reducer | recorder/src/publish/dialect/value.rs | MAX_REDUCER_STEPS
a summary: one part | analyzer/src/input/rsum/mod.rs | MAX_PART
a summary: tables together, unpacked | analyzer/src/input/rsum/read.rs | MAX_TABLE_BYTES
a summary: rows of all tables | analyzer/src/input/rsum/read.rs | MAX_ROWS
a summary: items of one record's tables | analyzer/src/input/rsum/wire.rs | MAX_ITEMS
a summary: failures of a record | analyzer/src/input/rsum/read.rs | MAX_FAILURES
a summary: links of a record | analyzer/src/input/rsum/read.rs | MAX_PEERS
a summary: paths of all problems beyond the first of each | analyzer/src/input/rsum/read.rs | MAX_MORE_PATHS
a log: one line | analyzer/src/input/log/mod.rs | MAX_LINE
a log: facts | analyzer/src/input/log/mod.rs | MAX_FACTS
a log: processes with a rank | analyzer/src/input/log/mod.rs | MAX_PROCESSES
a log of NCCL's Inspector: one line | analyzer/src/input/inspector/mod.rs | MAX_LINE
a log of NCCL's Inspector: series | analyzer/src/input/inspector/mod.rs | MAX_SERIES
NCCL's RAS service: a report | analyzer/src/live/source/network/ras/mod.rs | MOST_REPORT
NCCL's RAS service: another line | analyzer/src/live/source/network/ras/mod.rs | MOST_LINE
NCCL's RAS service: an event | analyzer/src/live/source/network/ras/monitor.rs | MOST_EVENT
a RAS report: ranks listed by number alone | analyzer/src/input/ras/text.rs | MOST_LISTED
a stack trace: frames | analyzer/src/input/stacks.rs | MOST_FRAMES
the merged stacks of a report: frames of one stack | analyzer/verdict/src/report/stack.rs | MAX_DEPTH
a dump through a pipe | analyzer/src/live/source/node/dump_pipes.rs | MAX_DUMP
a value of PyTorch's store that a live view reads | analyzer/src/live/source/network/store.rs | MOST_VALUE
a line of a recording of a live view | analyzer/src/live/recording.rs | MOST_BYTES
the answer of `nvidia-smi` | analyzer/src/live/source/node/process_facts/gpu.rs | MOST_BYTES
messages of the kernel that a live view keeps | analyzer/src/live/source/node/process_facts/log.rs | MOST_MESSAGES
`rcomm-fr collect`: a file | analyzer/src/cli/collect/local.rs | MAX_FILE
`rcomm-fr collect`: the archive of one host | analyzer/src/cli/collect/remote.rs | MAX_ANSWER
`rcomm-fr collect`: a member of such an archive | analyzer/src/cli/collect/remote.rs | MAX_MEMBER
`rcomm-fr collect`: the output of py-spy | analyzer/src/cli/collect/py_spy.rs | MAX_OUTPUT
`rcomm-fr diff`: a report | analyzer/src/cli/diff.rs | MAX_REPORT
";

/// The files and folders of readers of bytes from outside. Every constant in them whose name begins with `MAX_` or
/// `MOST_` is in [`LIMITS`] or in [`EXEMPT`].
const READERS: &[&str] = &[
    "recorder/src/publish",
    "runtime/core/src/store",
    "runtime/core/src/world",
    "runtime/core/src/config",
    "runtime/core/src/group/objects",
    "runtime/cpu/src/mesh",
    "runtime/cpu/src/p2p",
    "runtime/capi/src/store.rs",
    "runtime/nccl/src/context/ras.rs",
    "runtime/tools/src/launch",
    "analyzer/src/input",
    "analyzer/src/live",
    "analyzer/src/cli/collect",
    "analyzer/src/cli/diff.rs",
    "web/src/http",
    "web/src/serve",
    "web/src/api",
    "web/src/nodes",
];

/// The constants of these readers that do not limit what is read, each with the reason.
const EXEMPT: &str = "
recorder/src/publish/client.rs | MAX_ERROR_TEXT | shortens a text for a message
recorder/src/publish/dump_file.rs | MAX_NUMBERED | counts files that this process writes
recorder/src/publish/handlers.rs | MAX_NAME | limits what the program itself passes
recorder/src/publish/threads.rs | MAX_CALLERS | of this process's own threads
recorder/src/publish/dialect/read_pickle/mod.rs | MAX_RESERVED | a first allocation, not a limit of what is read
recorder/src/publish/dialect/read_pickle/mod.rs | MAX_PLAN | a cache
runtime/core/src/store/collectives.rs | MAX_RANKS | shortens a list in a message
runtime/core/src/world/departure.rs | MAX_RANKS | shortens a list in a message
runtime/core/src/world/init.rs | MAX_RANKS | shortens a list in a message
runtime/core/src/world/merge_remote.rs | MAX_RANKS | shortens a list in a message
runtime/core/src/world/round.rs | MAX_RANKS | shortens a list in a message
runtime/cpu/src/mesh/host.rs | MAX_NAMED | shortens a list in a message
analyzer/src/input/load/unpack.rs | MAX_RATIO | a ratio, above the limit of a file
analyzer/src/input/load/manifest.rs | MOST_PROCESSES | shortens a list in a message
analyzer/src/input/log/mod.rs | MAX_ATTEMPTS | facts of older attempts are counted, not kept
analyzer/src/input/log/restart.rs | MAX_STORED | within the limit of facts
analyzer/src/input/log/label.rs | MOST_LABELS | within the limit of a line
analyzer/src/input/log/scan.rs | MAX_ENTRIES | within the limit of a line
analyzer/src/input/log/torch.rs | MOST_TEXT | within the limit of a line
analyzer/src/input/log/torch.rs | MOST_RANKS | a number above it is no rank
analyzer/src/input/inspector/mod.rs | MAX_SAMPLES | samples are thinned out, not refused
analyzer/src/input/inspector/line.rs | MAX_TEXT | within the limit of a line
analyzer/src/input/stacks.rs | MOST_SHOWN | shortens what is shown
analyzer/src/input/stacks.rs | MAX_NAME | shortens what is shown
analyzer/src/live/jobs.rs | MOST_JUDGED | how many jobs are judged for a list
analyzer/src/live/source/node/rank_jobs.rs | MAX_COMMAND | shortens what is shown
analyzer/src/live/source/node/rings/mod.rs | MOST_NAMED | shortens a list in a message
analyzer/src/live/source/node/threads.rs | MOST_THREADS | of processes of this host, from the kernel
analyzer/src/live/source/network/store.rs | MOST_REASON | shortens a text for a message
analyzer/src/live/source/node/process_facts/log.rs | MOST_AGE_MS | an age of messages
analyzer/src/live/source/node/process_facts/mod.rs | MOST_RANKS | shortens a list in a message
analyzer/src/cli/collect/native_stack.rs | MAX_FRAMES | of processes of this host, from the kernel
analyzer/src/cli/collect/running.rs | MAX_NATIVE_STACKS | how many processes are looked at
web/src/http/compress.rs | MAX_BYTES | of this server's own answers
web/src/api/uploaded.rs | MAX_UNPACKED_RATIO | a ratio, stated below the table
web/src/api/matrix.rs | MAX_COLUMNS | of this server's own answers
";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The three fields of each line.
fn lines(table: &str) -> impl Iterator<Item = [&str; 3]> {
    let lines = table.lines().filter(|line| !line.is_empty());
    lines.map(|line| {
        let fields: Vec<&str> = line.split(" | ").collect();
        fields
            .try_into()
            .unwrap_or_else(|_| panic!("{line}: three fields are expected"))
    })
}

/// The value of a constant, or of a field of the default: a number, or a number of seconds.
fn value(file: &str, name: &str) -> u64 {
    let text = read(file);
    let constant = format!("const {name}: ");
    let field = format!("            {name}: ");
    let is_definition = |line: &&str| line.contains(&constant) || line.starts_with(&field);
    let line = text.lines().find(is_definition);
    let line = line.unwrap_or_else(|| panic!("{file} has no {name}"));
    let expression = match line.split_once(" = ") {
        Some((_, expression)) => expression,
        None => line.split_once(": ").unwrap().1,
    };
    let begin = expression.find(|c: char| c.is_ascii_digit()).unwrap();
    let expression = &expression[begin..];
    let digits = |text: &str| -> u64 {
        let digits = text.trim().chars().filter(|&c| c != '_');
        let digits: String = digits.take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    match expression.split_once(" << ") {
        Some((number, shift)) => digits(number) << digits(shift),
        None => expression.split(" * ").map(digits).product(),
    }
}

#[test]
fn the_page_states_every_limit_as_it_is() {
    let page = read("docs/SECURITY.md");
    let (_, table) = page.split_once("## Limits\n").unwrap();
    let (table, _) = table.split_once("\n\n## ").unwrap_or((table, ""));
    let rows = table.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let (what, limit) = (cells.next()?, cells.next()?.trim_end_matches(" |"));
        let (number, unit) = limit.split_once(' ').unwrap_or((limit, ""));
        let number: u64 = number.parse().ok()?;
        let number = match unit {
            "KiB" => number << 10,
            "MiB" => number << 20,
            "GiB" => number << 30,
            "" | "s" => number,
            unit => panic!("{what}: the unit {unit} is not known"),
        };
        Some((what.to_owned(), number))
    });
    let stated: BTreeMap<String, u64> = rows.collect();
    let known = lines(LIMITS).map(|[what, file, name]| (what.to_owned(), value(file, name)));
    assert_eq!(
        stated,
        known.collect(),
        "the limits of docs/SECURITY.md (left) are not those of the code (right)"
    );
}

/// The file at a path, or all Rust files below the folder at it, without tests. Paths are relative to the root of the
/// repository.
fn sources(path: &Path) -> Vec<PathBuf> {
    let full = root().join(path);
    if full.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()));
    let names = entries.map(|entry| path.join(entry.unwrap().file_name()));
    let is_source = |path: &PathBuf| {
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        !is_test && (root().join(path).is_dir() || is_rust)
    };
    names
        .filter(is_source)
        .flat_map(|path| sources(&path))
        .collect()
}

#[test]
fn every_limit_of_a_reader_is_on_the_page_or_is_none() {
    let listed: BTreeSet<(&str, &str)> =
        lines(LIMITS).map(|[_, file, name]| (file, name)).collect();
    let exempt: BTreeSet<(&str, &str)> =
        lines(EXEMPT).map(|[file, name, _]| (file, name)).collect();
    let mut found = BTreeSet::new();
    for path in READERS.iter().flat_map(|path| sources(Path::new(path))) {
        let path = path.to_str().unwrap();
        for line in read(path).lines() {
            let Some((_, name)) = line.split_once("const ") else {
                continue;
            };
            let name = name.split(':').next().unwrap();
            if name.starts_with("MAX_") || name.starts_with("MOST_") {
                found.insert((path.to_owned(), name.to_owned()));
            }
        }
    }
    let has = |set: &BTreeSet<(&str, &str)>, (file, name): &(String, String)| {
        set.contains(&(&**file, &**name))
    };
    let missing: Vec<_> = found
        .iter()
        .filter(|constant| !has(&listed, constant) && !has(&exempt, constant))
        .collect();
    assert!(
        missing.is_empty(),
        "neither on the page nor exempt: {missing:?}"
    );
    let gone = exempt
        .iter()
        .filter(|(file, name)| !found.contains(&((*file).to_owned(), (*name).to_owned())));
    let gone: Vec<_> = gone.collect();
    assert!(gone.is_empty(), "exempt, but not in the sources: {gone:?}");
    let both: Vec<_> = listed.intersection(&exempt).collect();
    assert!(both.is_empty(), "on the page and exempt: {both:?}");
}
