//! Writes advice on how to get records where there are none: those of the jobs that run, and of the next job.

use super::{SearchedPath, list_of};
use crate::cli::output::page_width;
use rcomm_analyzer::source::{RankJob, RankProcess, dump_beginnings};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;
use textwrap::{WordSeparator, WordSplitter};

/// At most this many jobs are listed.
const MOST_LISTED: usize = 9;

/// Variables that control recording: the name, the older name (empty if there is none), the meaning.
const VARIABLES: [(&str, &str, &str); 5] = [
    (
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "operations kept: 2000 by default; 0, which is off, by default up to PyTorch 2.6",
    ),
    (
        "TORCH_FR_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "a dump at a time-out: on by default; in PyTorch versions whose recorder is off by default, off as well",
    ),
    (
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "the beginning of each dump's path",
    ),
    (
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "",
        "the beginning of the path of each rank's pipe: a byte written to it asks for a dump",
    ),
    (
        "RCOMM_RECORD",
        "",
        "1: the package rcomm records every group, for any backend",
    ),
];

/// What is printed in place of the meaning of `RCOMM_RECORD` for a job of which no record was found, although the
/// variable asks for one.
const NOT_RECORDED: &str = "and still no record was found: no group was made yet, or the package rcomm is not in the \
                            job's Python, or the job has another RCOMM_RING_DIR than this shell";

/// The text for a node without records: which paths were searched, how the variables are set, and what to do.
pub(super) fn advice(
    searched: &[SearchedPath],
    jobs: &[RankJob],
    environment: &dyn Fn(&str) -> Option<OsString>,
) -> String {
    let list = list_of(searched);
    let rest = how_to_get_records(jobs, environment);
    format!("no records on this node; looked in:\n{list}{rest}")
}

/// The text for given paths without records: when PyTorch writes dumps and where they are, and what to do for a job
/// that still hangs.
pub(in crate::cli) fn advice_for_paths() -> String {
    let environment = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let places = dump_beginnings(|name| environment(name).map(PathBuf::from)).into_iter();
    let places = places.fold(String::new(), |mut text, beginning| {
        let _ = writeln!(text, "  {}<rank>", beginning.display());
        text
    });
    let rest = how_to_get_records(&RankJob::of_node(), &environment);
    format!(
        "\nPyTorch writes dumps when an operation of NCCL times out, or when they are asked for; the dump of a rank \
         is then one of:\n{places}{rest}"
    )
}

/// The text for jobs whose ranks run on this node and of which no record was found: the list of these jobs, and how to
/// get their records. `jobs` must not be empty.
pub(super) fn running(jobs: &[RankJob]) -> String {
    let mut text = match jobs.len() {
        1 => "1 job with ranks here has no record in the places searched:\n".to_owned(),
        number => format!("{number} jobs with ranks here have no record in the places searched:\n"),
    };
    list(jobs, &mut text);
    append_hang_advice(jobs, &mut text);
    text
}

/// How the variables that control recording are set, and how to get records of a job that hangs and of the next one.
fn how_to_get_records(jobs: &[RankJob], environment: &dyn Fn(&str) -> Option<OsString>) -> String {
    let mut text = String::new();
    let first = jobs.first().and_then(|job| job.processes.first());
    match jobs {
        [] => text.push_str(
            "\nno process with MASTER_ADDR and a rank from its launcher (such as RANK and WORLD_SIZE) is visible here; \
             in this environment:\n",
        ),
        [_, others @ ..] => {
            let _ = writeln!(text, "\n{}", heading(jobs));
            list(jobs, &mut text);
            let environment_label = match others {
                [] => "its environment:",
                _ => "the environment of the first:",
            };
            let _ = writeln!(text, "{environment_label}");
        }
    }
    let value = |name: &str| match first {
        Some(first) => first.variables.get(name).cloned(),
        None => environment(name).map(|value| value.to_string_lossy().into_owned()),
    };
    let asks_for_record = |value: String| !matches!(value.as_str(), "" | "0");
    for (name, older, mut meaning) in VARIABLES {
        if name == "RCOMM_RECORD" && first.is_some() && value(name).is_some_and(asks_for_record) {
            meaning = NOT_RECORDED;
        }
        let set = [name, older]
            .into_iter()
            .filter(|name| !name.is_empty())
            .find_map(|name| Some(format!("{name}={}", value(name)?)));
        let set = set.unwrap_or_else(|| format!("{name} is not set"));
        let _ = writeln!(text, "  {set}\n      {meaning}");
    }
    text.push('\n');
    append_hang_advice(jobs, &mut text);
    text.push_str(
        "\nThe next job, so that it can be seen at any time:\n  \
         pip install ./rcomm-*.whl && RCOMM_RECORD=1 torchrun ...   then rcomm-top, or rcomm-fr\n",
    );
    text
}

/// The line above a list of jobs.
fn heading(jobs: &[RankJob]) -> String {
    match jobs.len() {
        1 => "1 job has ranks here:".to_owned(),
        number => format!("{number} jobs have ranks here:"),
    }
}

/// Appends a paragraph for each job, for at most [`MOST_LISTED`], and the number of the others.
fn list(jobs: &[RankJob], text: &mut String) {
    let page = textwrap::Options::new(page_width())
        .initial_indent("  ")
        .subsequent_indent("      ")
        // Users copy paths and options, so lines break only at spaces.
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation)
        .word_separator(WordSeparator::AsciiSpace);
    for line in RankJob::lines(jobs).iter().take(MOST_LISTED) {
        let _ = writeln!(text, "{}", textwrap::fill(line, &page));
    }
    if jobs.len() > MOST_LISTED {
        let _ = writeln!(text, "  and {} more", jobs.len() - MOST_LISTED);
    }
}

/// Appends what can be done for a job that hangs. If there are several jobs, the commands are for the first.
fn append_hang_advice(jobs: &[RankJob], text: &mut String) {
    let first = jobs.first();
    let store = first.and_then(|job| RankProcess::store(&job.processes[0]));
    let store = store.map_or_else(
        || "MASTER_ADDR:MASTER_PORT".to_owned(),
        |store| store.to_string(),
    );
    let (which, job) = match (jobs, first.and_then(RankJob::name)) {
        ([_, _, ..], Some(name)) => (
            ", for the first of them",
            format!("--job {} ", RankJob::argument(name)),
        ),
        _ => ("", String::new()),
    };
    let _ = writeln!(text, "A job that hangs now{which}:");
    let _ = writeln!(
        text,
        "  rcomm-fr collect --ask {job}--analyze -o job.rcap\n      \
         asks the ranks of this node for their records, takes their stacks where it can, and judges"
    );
    let _ = writeln!(
        text,
        "  rcomm-top --ras                      NCCL 2.24 and later: asks NCCL's RAS service"
    );
    let _ = writeln!(
        text,
        "  rcomm-top --store {store}   if the ranks called start_debug_server()"
    );
    text.push_str(
        "  or wait for the time-out (10 minutes for NCCL by default): PyTorch's NCCL backend then\n      \
         writes dumps, if its recorder and dumps are on\n",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::launch::Launched;

    #[test]
    fn without_records_the_variables_of_the_job_and_its_store_are_named() {
        let pairs = [
            ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"),
            ("MASTER_ADDR", "n07"),
            ("MASTER_PORT", "29500"),
        ];
        let variables = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let process = RankProcess {
            pid: u32::MAX,
            launched: Launched {
                rank: 3,
                world_size: 8,
                job: Some("n07-29500".to_owned()),
                attempt: 0,
            },
            variables: variables.into(),
        };
        let other = RankProcess {
            launched: Launched {
                job: Some("other".to_owned()),
                ..process.launched.clone()
            },
            ..process.clone()
        };
        let text = advice(&[], &RankJob::group(vec![process.clone()]), &|_| None);
        for part in [
            "1 job has ranks here:\n",
            "1 process without a record",
            "rank 3: process",
            "its environment:",
            "TORCH_NCCL_TRACE_BUFFER_SIZE=0",
            "TORCH_FR_DUMP_TEMP_FILE is not set",
            "--store n07:29500",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.contains("collect --ask --analyze"), "{text}");
        assert!(!text.contains(NOT_RECORDED), "{text}");
        let recorded = |value: &str| {
            let mut process = process.clone();
            let variable = ("RCOMM_RECORD".to_owned(), value.to_owned());
            process.variables.extend([variable]);
            advice(&[], &RankJob::group(vec![process]), &|_| None)
        };
        assert!(recorded("1").contains(NOT_RECORDED));
        assert!(!recorded("0").contains(NOT_RECORDED));
        // Of several jobs, each is listed with the option that chooses it.
        let text = advice(&[], &RankJob::group(vec![process, other]), &|_| None);
        for part in [
            "2 jobs have ranks here:\n",
            "  --job n07-29500   1 process",
            "  --job other   1 process",
            "the environment of the first:",
            "for the first of them:\n  rcomm-fr collect --ask --job ",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
