//! The list of all metrics, from which the Prometheus and the OTLP exporter take names, units and texts.

/// The type of a metric in Prometheus.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gauge,
    Counter,
    Histogram,
}

/// One metric, as both exporters describe it.
pub(crate) struct Metric {
    /// Name in Prometheus; a counter's samples end with `_total`.
    pub(crate) name: &'static str,
    /// Type in Prometheus.
    pub(crate) kind: Kind,
    /// Help text in Prometheus, description in OTLP.
    pub(crate) help: &'static str,
    /// Name and unit (UCUM) in OTLP; `None` if the metric is not exported there.
    pub(crate) otlp: Option<(&'static str, &'static str)>,
}

/// The OTLP name and unit of a metric, from a list of one pair or none: how a macro passes an optional argument.
const fn at_most_one(
    otlp: &[(&'static str, &'static str)],
) -> Option<(&'static str, &'static str)> {
    match otlp {
        [only] => Some(*only),
        _ => None,
    }
}

macro_rules! metrics {
    ($($id:ident $kind:ident $name:literal $help:literal $(=> $otlp:literal $unit:literal)?;)+) => {
        $(pub(crate) const $id: Metric = Metric {
            name: $name,
            kind: Kind::$kind,
            help: $help,
            otlp: at_most_one(&[$(($otlp, $unit))?]),
        };)+

        /// Every metric.
        #[cfg(test)]
        pub(crate) const ALL: &[Metric] = &[$($id),+];
    };
}

metrics! {
    BUILD_INFO Gauge "rcomm_build_info"
        "Version of rcomm-web.";
    JOB_INFO Gauge "rcomm_job_info"
        "Name of the job.";
    VERDICT_INFO Gauge "rcomm_verdict_info"
        "1 for the current verdict, 0 for the others.";
    STEP Gauge "rcomm_step"
        "Newest training step reported by the program: of the rank furthest behind (last) and furthest ahead (first).";
    INFLIGHT_COLLECTIVES Gauge "rcomm_inflight_collectives"
        "Operations issued by at least one rank and not completed by all."
        => "rcomm.inflight" "{operation}";
    SOURCE_ANSWERED_RANKS Gauge "rcomm_source_answered_ranks"
        "Ranks that answered in the newest read of the source.";
    SOURCE_KNOWN_RANKS Gauge "rcomm_source_known_ranks"
        "Ranks known to the source.";
    SOURCE_FAILING Gauge "rcomm_source_failing"
        "1 if the newest read of the source failed.";
    CULPRIT_RANK Gauge "rcomm_culprit_rank"
        "1 for each culprit and code of the findings that are no notes and that no other finding causes; at most 16 series.";
    RANK_STRAGGLER_TIME_RATIO Gauge "rcomm_rank_straggler_time_ratio"
        "Share of the job's time that was lost because of this rank, 0 to 1; the 16 largest.";
    RANK_ARRIVAL_LAG_P50_SECONDS Gauge "rcomm_rank_arrival_lag_p50_seconds"
        "Median arrival lag of each rank in rcomm_rank_straggler_time_ratio, in the group where it is largest.";
    FINDINGS Gauge "rcomm_findings"
        "Findings of the newest report, by code.";
    RANKS_EXPECTED Gauge "rcomm_ranks_expected"
        "World size of the job."
        => "rcomm.ranks.expected" "{rank}";
    RANKS_READ Gauge "rcomm_ranks_read"
        "Ranks whose records were read."
        => "rcomm.ranks.read" "{rank}";
    RANKS_SILENT Gauge "rcomm_ranks_silent"
        "Ranks that stopped answering."
        => "rcomm.ranks.silent" "{rank}";
    OLDEST_INFLIGHT_SECONDS Gauge "rcomm_oldest_inflight_seconds"
        "Age of the oldest pending operation; 0 if none is pending, or no age is known."
        => "rcomm.inflight.oldest" "s";
    STRAGGLER_TIME_RATIO Gauge "rcomm_straggler_time_ratio"
        "Share of the job's time that was lost because of the ranks that W220 names, 0 to 1; 0 if it names none."
        => "rcomm.straggler.time_ratio" "1";
    JUDGEMENTS Counter "rcomm_judgements"
        "Analyses made.";
    JUDGEMENT_SECONDS Gauge "rcomm_judgement_seconds"
        "Duration of the newest analysis.";
    JUDGED_TIMESTAMP_SECONDS Gauge "rcomm_judged_timestamp_seconds"
        "Time of the newest analysis, since the epoch. The analysis is repeated when records change.";
    RECORDER_DROPPED Counter "rcomm_recorder_dropped"
        "Records that rings dropped or overwrote, over all ranks.";
    RECORDER_UNREAD Counter "rcomm_recorder_unread"
        "Operations overwritten before rcomm-web saw them end, which the metrics of ended operations do not include.";
    RECORDER_ENTRIES Gauge "rcomm_recorder_entries"
        "Operations in the records that rcomm-web holds, over all ranks.";
    WATCHDOG_FIRES Counter "rcomm_watchdog_fires"
        "Sum of rcomm_collectives_timed_out over all its series.";
    WATCHDOG_HEARTBEAT_AGE_SECONDS Gauge "rcomm_watchdog_heartbeat_age_seconds"
        "Time since the last heartbeat of the slowest watchdog among live ranks.";
    PROCESSES_ALIVE Gauge "rcomm_processes_alive"
        "Ranks whose process is known to be alive.";
    PROCESSES_DEAD Gauge "rcomm_processes_dead"
        "Ranks whose process is known to be gone.";
    GROUPS_OMITTED Gauge "rcomm_groups_omitted"
        "Groups beyond the first 512, which have no series.";
    GROUP_RANKS Gauge "rcomm_group_ranks"
        "Members of the group, added up over groups of one name and description.";
    GROUP_INFLIGHT_COLLECTIVES Gauge "rcomm_group_inflight_collectives"
        "Pending collectives of the group, added up over groups of one name and description.";
    GROUP_OLDEST_INFLIGHT_SECONDS Gauge "rcomm_group_oldest_inflight_seconds"
        "Age of the group's oldest pending collective; 0 if none is pending, or no age is known.";
    LAST_ISSUED_SEQ Gauge "rcomm_last_issued_seq"
        "Newest collective sequence number that any member issued.";
    LAST_COMPLETED_SEQ Gauge "rcomm_last_completed_seq"
        "Newest collective sequence number completed by every member, where records include it.";
    MEMBERS_BEHIND_SEQ Gauge "rcomm_members_behind_seq"
        "Collectives by which the member furthest behind trails the one furthest ahead.";
    GROUP_ARRIVAL_LAG_P50_SECONDS Gauge "rcomm_group_arrival_lag_p50_seconds"
        "Median arrival lag of the group's recorded collectives; 0 if not measured.";
    GROUP_ARRIVAL_LAG_P99_SECONDS Gauge "rcomm_group_arrival_lag_p99_seconds"
        "99th percentile of the arrival lag of the group's recorded collectives; 0 if not measured.";
    BUS_BANDWIDTH_BYTES_PER_SECOND Gauge "rcomm_bus_bandwidth_bytes_per_second"
        "Median bus bandwidth of the group's collectives of at least 1 MiB; 0 if not measured.";
    COLLECTIVE_DURATION_SECONDS Histogram "rcomm_collective_duration_seconds"
        "From the arrival of the last member to completion, one value per collective."
        => "rcomm.collective.duration" "s";
    COLLECTIVE_ARRIVAL_LAG_SECONDS Histogram "rcomm_collective_arrival_lag_seconds"
        "From the arrival of the first member to that of the last, one value per collective."
        => "rcomm.collective.arrival_lag" "s";
    COLLECTIVES Counter "rcomm_collectives"
        "Operations completed, counted on each rank."
        => "rcomm.collectives" "{operation}";
    COLLECTIVES_FAILED Counter "rcomm_collectives_failed"
        "Operations that ended with an error or a time-out, counted on each rank."
        => "rcomm.collectives.failed" "{operation}";
    COLLECTIVES_TIMED_OUT Counter "rcomm_collectives_timed_out"
        "Operations that failed once their time-out had passed, counted on each rank.";
    COLLECTIVE_BYTES Counter "rcomm_collective_bytes"
        "Input bytes of completed operations, over all ranks."
        => "rcomm.collective.io" "By";
    REDUCER_STEP_SECONDS Gauge "rcomm_reducer_step_seconds"
        "The longest of the ranks' newest steps of data-parallel training: forward, backward, exposed communication."
        => "rcomm.reducer.step" "s";
    REDUCER_EXPOSED_SECONDS Gauge "rcomm_reducer_exposed_seconds"
        "The longest exposed communication of the ranks' newest reducer steps: what the backward pass did not hide."
        => "rcomm.reducer.exposed" "s";
    REDUCER_STEPS Counter "rcomm_reducer_steps"
        "Steps of reducers, counted on each rank."
        => "rcomm.reducer.steps" "{step}";
    REDUCER_SECONDS Counter "rcomm_reducer_seconds"
        "Time of reducer steps on all ranks: forward, backward, communication, and exposed, a part of communication."
        => "rcomm.reducer.time" "s";
    WEB_CONNECTIONS Gauge "rcomm_web_connections"
        "Open client connections.";
    WEB_EVENT_STREAMS Gauge "rcomm_web_event_streams"
        "Open event streams.";
    WEB_REQUESTS Counter "rcomm_web_requests"
        "Requests answered.";
    WEB_REQUESTS_DENIED Counter "rcomm_web_requests_denied"
        "Requests denied: missing or wrong token, unknown host name, or foreign origin.";
    WEB_CONNECTIONS_REFUSED Counter "rcomm_web_connections_refused"
        "Connections refused or closed because there were too many, in total or from one host.";
    WEB_SLOW_CLIENTS_DROPPED Counter "rcomm_web_slow_clients_dropped"
        "Clients dropped because they did not read their answer in time.";
    OTEL_SPANS_SENT Counter "rcomm_otel_spans_sent"
        "Spans accepted by the OTLP collector.";
    OTEL_SPANS_DROPPED Counter "rcomm_otel_spans_dropped"
        "Spans dropped because the export failed, or because more than 16,384 were due in one export or stuck at once.";
    OTEL_LOGS_SENT Counter "rcomm_otel_logs_sent"
        "Log records accepted by the OTLP collector.";
    OTEL_LOGS_DROPPED Counter "rcomm_otel_logs_dropped"
        "Log records dropped because the export failed.";
    OTEL_METRICS_SENT Counter "rcomm_otel_metrics_sent"
        "Metrics accepted by the OTLP collector.";
    OTEL_METRICS_DROPPED Counter "rcomm_otel_metrics_dropped"
        "Metrics dropped because the export failed.";
}
