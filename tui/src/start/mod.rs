//! Runs the command line: an interactive screen, one report for a script, or the text of a configuration file or of
//! completions.

pub mod cli;
pub mod config;
mod sources;

use self::cli::{Cli, CliCommand};
use self::config::Config;
use crate::app::terminal::Mouse;
use crate::app::{self, Inbox, background};
use crate::keys::Keymap;
use crate::page::layout;
use crate::page::theme::{Depth, Theme, ThemeName};
use crate::state::event::Event;
use crate::state::{Options, State, update};
use crate::view::text;
use anyhow::{Context as _, bail};
use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory as _, Parser as _};
use rcomm_analyzer::filter::Filter;
use rcomm_analyzer::recording::{RecordingReader, RecordingWriter};
use rcomm_analyzer::source::JobChoice;
use rcomm_analyzer::{
    Anchor, Code, JobsWatch, Live, LiveOptions, NodeJob, NodeJobs, Pace, Snapshot, Source, Watch,
    analyze_on_threads, print,
};
use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs the program `rcomm-top` with these arguments, the first of which is its name, and returns its exit code. Blocks
/// until the user quits or the report is printed. Ends the process if the arguments are wrong or ask for help.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    match start(parse(arguments), |name| std::env::var(name).ok()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // The terminal is restored by now; standard error is the only output left.
            let _ = writeln!(io::stderr(), "rcomm-top: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Parses the command line; ends the process if it is wrong or asks for help.
fn parse(arguments: Vec<OsString>) -> Cli {
    Cli::try_parse_from(&arguments).unwrap_or_else(|mut wrong| {
        let name = match wrong.get(ContextKind::InvalidSubcommand) {
            Some(ContextValue::String(name)) => name.clone(),
            _ => wrong.exit(),
        };
        if Path::new(&name).exists() {
            let tip = format!("records of a job are shown by `rcomm-top replay {name}`");
            let tips = vec![tip.into()];
            wrong.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
        wrong.exit()
    })
}

/// Executes the command line; returns the exit code. Blocks until the user quits or the report is printed.
///
/// # Errors
///
/// Wrong usage, no terminal, a configuration or a recording that cannot be read, a source that cannot be opened, a file
/// that cannot be recorded to, a thread that cannot be started, a failure of the view, of standard output or of
/// standard error. The program then exits with 2.
pub fn start(cli: Cli, env: impl Fn(&str) -> Option<String>) -> anyhow::Result<u8> {
    let mut out = io::stdout().lock();
    match &cli.command {
        Some(CliCommand::GenConfig) => {
            out.write_all(config::generated().as_bytes())?;
            return Ok(0);
        }
        Some(CliCommand::Completions { shell }) => {
            clap_complete::generate(*shell, &mut Cli::command(), "rcomm-top", &mut out);
            return Ok(0);
        }
        _ => drop(out),
    }
    let config = read_config(&cli, &env)?;
    let anchor = Anchor::now();
    let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !cli.view.once && !cli.view.json {
        if !terminal {
            bail!("this is not a terminal; in a script use --once or --json");
        }
        if env("TERM").as_deref() == Some("dumb") {
            bail!("this terminal (TERM=dumb) cannot move its cursor; use --once or --json");
        }
    }
    match recording(&cli)? {
        Some((reader, name)) => replay(&cli, &config, &env, reader, name, anchor),
        None => view_sources(&cli, &config, &env, anchor),
    }
}

/// The recording to replay; `None` if the paths are dumps, or nothing is replayed.
fn recording(cli: &Cli) -> anyhow::Result<Option<(RecordingReader, String)>> {
    let Some(CliCommand::Replay { paths, .. }) = &cli.command else {
        return Ok(None);
    };
    let [path] = paths.as_slice() else {
        return Ok(None);
    };
    let name = path.display().to_string();
    let reader = RecordingReader::open(path).with_context(|| format!("failed to read {name}"))?;
    Ok(reader.map(|reader| (reader, name)))
}

/// Analyzes every frame of a recording, then prints the result or shows it until the user quits; returns the exit
/// code.
fn replay(
    cli: &Cli,
    config: &Config,
    env: &impl Fn(&str) -> Option<String>,
    mut reader: RecordingReader,
    name: String,
    anchor: Anchor,
) -> anyhow::Result<u8> {
    let mut live = live(
        cli,
        config,
        vec![format!("recording {name}")],
        RecordedJob::Running,
    )?;
    let mut state = state(cli, config, env, true, anchor)?;
    let mut last = None;
    loop {
        match reader.next_frame() {
            Ok(Some((at, poll))) => {
                live.observe(0, Ok(poll), at);
                if let Some(snapshot) = live.refresh(at) {
                    let snapshot = Arc::new(snapshot);
                    update(&mut state, Event::Observed(snapshot.clone()));
                    last = Some(snapshot);
                }
            }
            Ok(None) => break,
            // The frames before the damage are valid, so they are shown.
            Err(error) => {
                let text = format!("{name} is damaged after this frame: {error}");
                update(&mut state, Event::Done(Err(text)));
                break;
            }
        }
    }
    let Some(last) = last else {
        bail!("{name} contains no frames");
    };
    if cli.view.once || cli.view.json {
        return print_result(cli, state, &last);
    }
    app::run(
        state,
        &Inbox::default(),
        anchor,
        mouse(cli, config),
        &Arc::default(),
    )
    .map(|()| 0)
}

/// Reads the sources, once or until the user quits; returns the exit code.
fn view_sources(
    cli: &Cli,
    config: &Config,
    env: &impl Fn(&str) -> Option<String>,
    anchor: Anchor,
) -> anyhow::Result<u8> {
    let job = JobChoice::of(cli.from.job.clone());
    let sources = sources::of(cli, anchor, &job)?;
    let fault_ns = sources::simulated_fault_ns(cli, anchor);
    let still = sources.iter().all(|source| source.is_static());
    let recorded = match cli.command {
        Some(CliCommand::Replay {
            snapshot: false, ..
        }) => RecordedJob::PostMortem,
        _ => RecordedJob::Running,
    };
    let names = sources.iter().map(|source| source.name()).collect();
    let live = live(cli, config, names, recorded)?;
    let mut state = state(cli, config, env, still, anchor)?;
    state.options.dumps = still;
    state.options.fault_ns = fault_ns;
    let targets = Arc::new(sources::request_targets(cli, &job)?);
    state.options.askable = !targets.dumps.is_empty();
    state.options.stacks_askable = !targets.stacks.is_empty();
    state.options.reads_process_facts = targets.process_facts.is_some();
    let mut recorder = match &cli.view.record {
        Some(path) => Some(
            RecordingWriter::create(path)
                .with_context(|| format!("failed to record to {}", path.display()))?,
        ),
        None => None,
    };
    if cli.view.once || cli.view.json {
        // A job that the rings do not show, as one behind a store, has no others beside it.
        let directory = (targets.job.as_ref()).map(|_| sources::ring_directory(&cli.from));
        return once(cli, (sources, directory), live, state, recorder, anchor);
    }
    let pace = Pace {
        refresh: setting(cli.view.refresh, config.refresh.as_deref(), "refresh")?
            .unwrap_or(Pace::default().refresh),
        ..Pace::default()
    };
    let inbox = Inbox::default();
    let jobs = match &targets.job {
        Some(_) => {
            let sender = inbox.sender();
            let directory = sources::ring_directory(&cli.from);
            let sink = move |jobs: Vec<NodeJob>| {
                // This fails if the loop has ended.
                let _ = sender.send(Event::Jobs(jobs.into()));
            };
            Some(JobsWatch::start(directory, anchor, sink).context("failed to start a thread")?)
        }
        None => None,
    };
    let sender = inbox.sender();
    let watch = Watch::start(sources, live, pace, anchor, move |snapshot| {
        if let Some(writer) = &mut recorder
            && let Err(error) = writer.write(&snapshot)
        {
            let text = format!("recording stopped: {error}");
            // This fails if the loop has ended.
            let _ = sender.send(Event::Done(Err(text)));
            recorder = None;
        }
        // This fails if the loop has ended.
        let _ = sender.send(Event::Observed(Arc::new(snapshot)));
    })
    .context("failed to start a thread")?;
    let shown = app::run(state, &inbox, anchor, mouse(cli, config), &targets);
    drop(jobs);
    watch.stop();
    shown.map(|()| 0)
}

fn mouse(cli: &Cli, config: &Config) -> Mouse {
    match cli.view.mouse.or(config.mouse) {
        Some(false) => Mouse::Off,
        _ => Mouse::On,
    }
}

/// Whether the records were taken while the job ran, or after it ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RecordedJob {
    Running,
    PostMortem,
}

/// Reads the configuration file. Returns the defaults if none was given and the default one does not exist.
fn read_config(cli: &Cli, env: &impl Fn(&str) -> Option<String>) -> anyhow::Result<Config> {
    let (path, is_given) = match &cli.view.config {
        Some(path) => (Some(path.clone()), true),
        None => {
            let (xdg, home) = (env("XDG_CONFIG_HOME"), env("HOME"));
            (config::default_path(xdg.as_deref(), home.as_deref()), false)
        }
    };
    let Some(path) = path else {
        return Ok(Config::default());
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_given => {
            return Ok(Config::default());
        }
        Err(error) => {
            return Err(error).with_context(|| format!("failed to read {}", path.display()));
        }
    };
    Config::parse(&text).map_err(|error| anyhow::anyhow!("in {}: {error}", path.display()))
}

/// The duration given on the command line, else that of the configuration; `None` if neither has one.
fn setting(
    given: Option<Duration>,
    configured: Option<&str>,
    name: &str,
) -> anyhow::Result<Option<Duration>> {
    match (given, configured) {
        (Some(given), _) => Ok(Some(given)),
        (None, Some(text)) => match cli::duration(text) {
            Ok(duration) => Ok(Some(duration)),
            Err(error) => bail!("{name} in the configuration: {error}"),
        },
        (None, None) => Ok(None),
    }
}

/// The analysis of the view, with the thresholds of the command line and the configuration.
fn live(
    cli: &Cli,
    config: &Config,
    names: Vec<String>,
    recorded: RecordedJob,
) -> anyhow::Result<Live> {
    let replay = matches!(cli.command, Some(CliCommand::Replay { .. }));
    let mut options = if replay {
        LiveOptions::post_mortem()
    } else {
        LiveOptions::default()
    };
    options.policy.snapshot = recorded == RecordedJob::Running;
    for (name, warning) in &config.warnings {
        let Some(threshold) = warning.threshold else {
            continue;
        };
        match Code::parse(name) {
            Some(Code::W220) if (0.0..=1.0).contains(&threshold) => {
                options.policy.straggler_share = threshold;
            }
            Some(Code::W220) => bail!(
                "in the configuration: [warnings.{name}]: the threshold is a share from 0 to 1"
            ),
            _ => bail!("in the configuration: [warnings.{name}]: this code has no threshold"),
        }
    }
    options.policy.world_size = cli.from.network.world_size;
    if let Some(overdue) = setting(cli.view.overdue, config.overdue.as_deref(), "overdue")? {
        options.policy.overdue = overdue;
    }
    let silent = setting(None, config.silent_after.as_deref(), "silent_after")?;
    if let Some(silent) = silent.filter(|_| !replay) {
        options.silent_after = silent;
    }
    Ok(Live::new(options, analyze_on_threads, names))
}

/// The state before the first snapshot; `still` if the sources never change.
fn state(
    cli: &Cli,
    config: &Config,
    env: &impl Fn(&str) -> Option<String>,
    still: bool,
    anchor: Anchor,
) -> anyhow::Result<State> {
    let depth = cli.view.colours.or(config.colours).unwrap_or_else(|| {
        let (no_color, colorterm, term) = (env("NO_COLOR"), env("COLORTERM"), env("TERM"));
        Depth::detect(no_color.as_deref(), colorterm.as_deref(), term.as_deref())
    });
    let theme = match cli.view.theme.or(config.theme) {
        Some(theme) => theme,
        None => usual_theme(cli, depth, env),
    };
    let keymap = Keymap::with(&config.keys)
        .map_err(|error| anyhow::anyhow!("in the configuration: {error}"))?;
    // Printed text names no key that its reader cannot press.
    let keymap = match cli.view.once {
        true => Keymap::without_keys(),
        false => keymap,
    };
    let mut muted = std::collections::BTreeSet::new();
    for (name, warning) in &config.warnings {
        let Some(code) = Code::parse(name) else {
            bail!("in the configuration: [warnings.{name}]: no such code");
        };
        if !warning.enabled {
            muted.insert(code);
        }
    }
    let options = Options {
        theme: Theme::new(theme, depth),
        ascii: cli.view.ascii || config.ascii == Some(true),
        allow_actions: cli.view.allow_actions || config.actions.allow,
        askable: false,
        stacks_askable: false,
        reads_process_facts: false,
        still,
        dumps: false,
        fault_ns: None,
        history: config.history_mib.map(|mib| mib << 20),
        keymap,
        muted,
        columns: config.columns.clone(),
        layout: config.layout.overview.clone(),
    };
    // This size applies until that of the terminal is known.
    let mut state = State::new(options, (100, 40), anchor.moment());
    if let Some(text) = &cli.view.filter {
        state.filter = Filter::parse(text).context("--filter")?;
    }
    Ok(state)
}

/// The theme if none was chosen: the light one if the terminal's background is light. The terminal is asked only if it
/// has enough colors for the themes to differ.
fn usual_theme(cli: &Cli, depth: Depth, env: &impl Fn(&str) -> Option<String>) -> ThemeName {
    let draws = !cli.view.once && !cli.view.json;
    if !draws || !matches!(depth, Depth::Indexed | Depth::True) {
        return ThemeName::default();
    }
    match background::is_light(env("COLORFGBG").as_deref()) {
        Some(true) => ThemeName::Light,
        _ => ThemeName::default(),
    }
}

/// Reads each source once, for at most ten seconds each (files without a limit), and prints the result, and which other
/// jobs with rings in the directory are in trouble; returns the exit code.
fn once(
    cli: &Cli,
    (sources, directory): (Vec<Box<dyn Source>>, Option<PathBuf>),
    mut live: Live,
    mut state: State,
    mut recorder: Option<RecordingWriter>,
    anchor: Anchor,
) -> anyhow::Result<u8> {
    for (number, mut source) in sources.into_iter().enumerate() {
        let poll = source.poll(Instant::now() + Duration::from_secs(10));
        live.observe(number, poll, anchor.moment());
    }
    let at = anchor.moment();
    let snapshot = Arc::new(live.refresh(at).unwrap_or_else(|| Snapshot::empty(at)));
    if let Some(writer) = &mut recorder {
        writer.write(&snapshot).context("failed to record")?;
    }
    drop(recorder);
    update(&mut state, Event::Observed(snapshot.clone()));
    if let Some(directory) = directory.filter(|_| !cli.view.json) {
        let jobs = NodeJobs::poll_several(directory, anchor);
        update(&mut state, Event::Jobs(jobs.into()));
    }
    print_result(cli, state, &snapshot)
}

/// The minimum height of the screen that `--once` lays out. The blank lines of the screen are not printed.
const MIN_ROWS_OF_ONCE: u16 = 24;

/// Prints the report or the first screen; returns the exit code. Without any rank, prints to standard error what each
/// source reported and the problems of the input, and returns 2.
fn print_result(cli: &Cli, mut state: State, snapshot: &Snapshot) -> anyhow::Result<u8> {
    let mut out = io::stdout().lock();
    let empty = snapshot.ranks.is_empty();
    let written = if empty {
        let mut stderr = io::stderr().lock();
        for source in &snapshot.sources {
            let error = source.error.as_deref().unwrap_or("reports no ranks");
            writeln!(stderr, "rcomm-top: {}: {error}", source.name)?;
        }
        for problem in &snapshot.report.problems {
            let (code, path) = (problem.code, &problem.path);
            writeln!(stderr, "rcomm-top: {code} {path}: {}", problem.sentence)?;
        }
        Ok(())
    } else if cli.view.json {
        print::json::write(&snapshot.report, &mut out)
    } else {
        let columns = ratatui::crossterm::terminal::size().map_or(100, |(columns, _)| columns);
        // Bounds for scripts, which may have no terminal or a very wide one.
        let columns = columns.clamp(80, 200);
        update(&mut state, Event::Resize(columns, MIN_ROWS_OF_ONCE));
        // On screens with fewer rows the sentences of the head are cut.
        let rows = layout::needed(&state.page, state.size).clamp(MIN_ROWS_OF_ONCE, 500);
        update(&mut state, Event::Resize(columns, rows));
        // The last line is for messages and keys. Blank lines only fill the screen.
        let screen = text::of(&state);
        let shown = screen.lines().take(usize::from(rows) - 1);
        let lines: Vec<&str> = shown.filter(|line| !line.trim_end().is_empty()).collect();
        writeln!(out, "{}", lines.join("\n").trim_end())
    };
    match written {
        // The reader of the output may close the pipe early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.context("failed to write to standard output")?,
    }
    Ok(if empty {
        2
    } else {
        snapshot.report.exit_code()
    })
}
