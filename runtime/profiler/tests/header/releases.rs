//! Lets a C++ compiler compare the interface with the headers of NCCL's releases: names, order, types and sizes.
//!
//! `RCOMM_TEST_NCCL_SOURCES` names folders with the source of one release each, with colons between them. The sources
//! are not in this repository. The interface has been compared with the headers of 2.26.2, 2.26.3, 2.26.5, 2.26.6,
//! 2.27.3, 2.27.5, 2.27.6, 2.27.7, 2.28.3, 2.28.7, 2.28.9, 2.29.2, 2.29.3, 2.29.7, 2.30.3, 2.30.4 and 2.30.7.

use super::{EVENTS, FACTS, STATES};
use rcomm_nccl_profiler::abi::{
    Coll, CollApi, CollV5, DescriptorV3, DescriptorV4, DescriptorV5, GroupApi, KernelCh, NamedColl,
    NamedP2p, P2p, P2pApi, P2pV5, ProxyOp, ProxyOpArgsV3, ProxyStep,
};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

/// A field of NCCL's descriptor: its name in C, the offset of ours, and its type in C.
type Field = (&'static str, usize, &'static str);

/// The fields of a struct, whose offset from the facts is `$base`: `C name = our field: C type`.
macro_rules! fields {
    ($base:expr, $Struct:ty: $($name:literal = $field:ident: $kind:literal;)*) => {
        vec![$(($name, FACTS + $base + offset_of!($Struct, $field), $kind)),*]
    };
}

/// The fields of a collective, at this offset from the facts. Version 3 gives the largest number of channels.
fn coll(base: usize, version: u32) -> Vec<Field> {
    let mut all = fields! { base, Coll:
        "coll.seqNumber" = seq_number: "uint64_t";
        "coll.func" = func: "const char*";
        "coll.sendBuff" = send_buffer: "void const*";
        "coll.recvBuff" = receive_buffer: "void*";
        "coll.count" = count: "size_t";
        "coll.root" = root: "int";
        "coll.datatype" = datatype: "const char*";
        "coll.nChannels" = channels: "uint8_t";
        "coll.nWarps" = warps: "uint8_t";
        "coll.algo" = algorithm: "const char*";
        "coll.proto" = protocol: "const char*";
    };
    if version == 3 {
        all[7].0 = "coll.nMaxChannels";
    }
    all
}

fn p2p() -> Vec<Field> {
    fields! { 0, P2p:
        "p2p.func" = func: "const char*";
        "p2p.buff" = buffer: "void*";
        "p2p.datatype" = datatype: "const char*";
        "p2p.count" = count: "size_t";
        "p2p.peer" = peer: "int";
        "p2p.nChannels" = channels: "uint8_t";
    }
}

fn calls() -> Vec<Field> {
    let mut all = fields! { 0, CollApi:
        "collApi.func" = func: "const char*";
        "collApi.count" = count: "size_t";
        "collApi.datatype" = datatype: "const char*";
        "collApi.root" = root: "int";
        "collApi.stream" = stream: "void*";
        "collApi.graphCaptured" = graph_captured: "bool";
    };
    all.extend(fields! { 0, P2pApi:
        "p2pApi.func" = func: "const char*";
        "p2pApi.count" = count: "size_t";
        "p2pApi.datatype" = datatype: "const char*";
        "p2pApi.stream" = stream: "void*";
        "p2pApi.graphCaptured" = graph_captured: "bool";
    });
    all.extend(fields! { 0, GroupApi:
        "groupApi.graphCaptured" = graph_captured: "bool";
        "groupApi.groupDepth" = depth: "int";
    });
    all.extend(fields! { 0, CollV5: "coll.parentGroup" = parent_group: "void*"; });
    all.extend(fields! { 0, P2pV5: "p2p.parentGroup" = parent_group: "void*"; });
    all
}

fn proxy_events() -> Vec<Field> {
    let mut all = fields! { 0, ProxyOp:
        "proxyOp.pid" = pid: "pid_t";
        "proxyOp.channelId" = channel: "uint8_t";
        "proxyOp.peer" = peer: "int";
        "proxyOp.nSteps" = steps: "int";
        "proxyOp.chunkSize" = chunk_size: "int";
        "proxyOp.isSend" = is_send: "int";
    };
    all.extend(fields! { 0, ProxyStep: "proxyStep.step" = step: "int"; });
    all.extend(fields! { 0, KernelCh: "kernelCh.channelId" = channel: "uint8_t"; });
    all
}

/// The head of a descriptor, and all fields that the plug-in has in this version.
fn fields_of(version: u32) -> Vec<Field> {
    let kind = if version < 5 { "uint8_t" } else { "uint64_t" };
    let mut all = vec![
        ("type", offset_of!(DescriptorV5, kind), kind),
        ("parentObj", offset_of!(DescriptorV5, parent), "void*"),
        ("rank", offset_of!(DescriptorV5, rank), "int"),
    ];
    all.extend(proxy_events());
    if version == 3 {
        all.extend(coll(offset_of!(NamedColl, coll), version));
        all.extend(fields! { 0, NamedColl:
            "coll.name" = comm_name: "const char*";
            "coll.commHash" = comm_hash: "uint64_t";
        });
        all.extend(fields! { 0, NamedP2p:
            "p2p.name" = comm_name: "const char*";
            "p2p.commHash" = comm_hash: "uint64_t";
            "p2p.func" = func: "const char*";
            "p2p.buff" = buffer: "void*";
            "p2p.datatype" = datatype: "const char*";
            "p2p.count" = count: "size_t";
            "p2p.peer" = peer: "int";
        });
        return all;
    }
    all.extend(coll(0, version));
    all.extend(p2p());
    all.extend(fields! { 0, KernelCh: "kernelCh.pTimer" = timer: "uint64_t"; });
    if version >= 5 {
        all.extend(calls());
    }
    all
}

/// What must come before NCCL's header, and would come from a release that has been built.
const PREAMBLE: &str = "\
#include <cstddef>
#include <cstdint>
#include <sys/types.h>
#include <type_traits>
#define NCCL_OS_H_
typedef pid_t ncclPid_t;
typedef enum { ncclSuccess = 0, ncclInvalidUsage = 5 } ncclResult_t;
typedef enum { NCCL_LOG_NONE } ncclDebugLogLevel;
typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel, unsigned long, const char*, int, const char*, ...);
#include \"plugin/nccl_profiler.h\"
#define HAS(condition) static_assert(condition, #condition)
#define IS(field, kind) \\
    static_assert(std::is_same<typename std::decay<decltype(field)>::type, kind>::value, #field \" is a \" #kind)
";

/// A program that compiles if the header has these versions of the interface, as the plug-in knows them.
fn program(versions: &[u32]) -> String {
    let mut text = PREAMBLE.to_owned();
    let newest = versions.iter().copied().max().unwrap_or_default();
    // Writing into a text does not fail.
    for (name, bit, since) in EVENTS {
        if since <= newest {
            let _ = writeln!(text, "HAS(ncclProfile{name} == 1 << {bit});");
        }
    }
    for (name, number, since) in STATES {
        if since <= newest {
            let _ = writeln!(text, "HAS(ncclProfiler{name} == {number});");
        }
    }
    for &version in versions {
        let (size, init) = match version {
            3 => (size_of::<DescriptorV3>(), "void**, int*"),
            4 => (
                size_of::<DescriptorV4>(),
                "void**, int*, const char*, uint64_t, int, int, int, ncclDebugLogger_t",
            ),
            _ => (
                size_of::<DescriptorV5>(),
                "void**, uint64_t, int*, const char*, int, int, int, ncclDebugLogger_t",
            ),
        };
        let descriptor = format!("ncclProfilerEventDescr_v{version}_t");
        let args = format!("ncclProfilerEventStateArgs_v{version}_t");
        let table = format!("ncclProfiler_v{version}_t");
        let _ = writeln!(text, "HAS(sizeof({descriptor}) == {size});");
        for (name, offset, kind) in fields_of(version) {
            let _ = writeln!(text, "HAS(offsetof({descriptor}, {name}) == {offset});");
            let _ = writeln!(text, "IS((({descriptor}*)0)->{name}, {kind});");
        }
        let (size, number) = match version {
            3 => (size_of::<ProxyOpArgsV3>(), "proxyOp.steps"),
            _ => (8, "kernelCh.pTimer"),
        };
        let offset = match version {
            3 => offset_of!(ProxyOpArgsV3, steps),
            _ => 0,
        };
        let _ = writeln!(text, "HAS(sizeof({args}) == {size});");
        let _ = writeln!(text, "HAS(offsetof({args}, {number}) == {offset});");
        let state = format!("void*, ncclProfilerEventState_v{version}_t, {args}*");
        let functions = [
            ("init", init),
            ("startEvent", &format!("void*, void**, {descriptor}*")),
            ("stopEvent", "void*"),
            ("recordEventState", &state),
            ("finalize", "void*"),
        ];
        let _ = writeln!(text, "HAS(sizeof({table}) == 48);");
        let _ = writeln!(text, "IS((({table}*)0)->name, const char*);");
        for (index, (name, arguments)) in (1..).zip(functions) {
            let _ = writeln!(text, "HAS(offsetof({table}, {name}) == {});", index * 8);
            let _ = writeln!(
                text,
                "static_assert(std::is_same<decltype({table}::{name}), ncclResult_t (*)({arguments})>::value, \"{name}\");"
            );
        }
    }
    text
}

/// Compiles the program with the headers of a release. The error is what the compiler says.
fn compile(text: &str, include: &Path) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let source = folder.path().join("header.cc");
    std::fs::write(&source, text).map_err(|error| error.to_string())?;
    let output = Command::new("c++")
        .args(["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-I"])
        .arg(include)
        .arg(&source)
        .output()
        .map_err(|error| format!("c++: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
#[allow(clippy::print_stderr, reason = "a test that is skipped says so")]
fn the_headers_of_nccl_s_releases_agree_with_the_interface() {
    let Ok(sources) = std::env::var("RCOMM_TEST_NCCL_SOURCES") else {
        eprintln!("skipped: RCOMM_TEST_NCCL_SOURCES names no source of a release of NCCL");
        return;
    };
    let mut seen = Vec::new();
    for source in std::env::split_paths(&sources) {
        let include = source.join("src/include");
        let has = |version: &u32| {
            (include.join(format!("plugin/profiler/profiler_v{version}.h"))).is_file()
        };
        let versions: Vec<u32> = (3..=6).filter(has).collect();
        assert!(!versions.is_empty(), "{}: no header", source.display());
        let text = program(&versions);
        if let Err(said) = compile(&text, &include) {
            panic!("{}: {said}", source.display());
        }
        // The compiler does look: it refuses a field that is elsewhere.
        let moved = text.replace("coll.count) == ", "coll.count) == 1 + ");
        assert!(compile(&moved, &include).is_err(), "{}", source.display());
        seen.extend(versions);
    }
    assert!(!seen.is_empty(), "no release");
}
