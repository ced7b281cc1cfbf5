//! Reads a zstd stream of any number of frames, as `zstd` and `pzstd` write them.

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::error::Error;
use std::io::{self, BufRead, BufReader, Read};

/// A reader of what the frames of the input unpack to.
pub(super) struct Frames<R> {
    input: BufReader<R>,
    decoder: FrameDecoder,
    within_frame: bool,
}

impl<R: Read> Frames<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input: BufReader::new(input),
            decoder: FrameDecoder::new(),
            within_frame: false,
        }
    }

    /// Begins the next frame; `false` at the end of the input.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.input.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.init(&mut self.input) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = (&mut self.input).take(length.into());
                    io::copy(&mut { skipped }, &mut io::sink())?;
                }
                Err(error) => return Err(decode_error(&error)),
            }
        }
    }
}

/// Describes an error in the stream. The decoder's own text is for its developers and is left out.
fn decode_error(error: &FrameDecoderError) -> io::Error {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.kind() {
                io::ErrorKind::UnexpectedEof => {
                    io::Error::new(io.kind(), "its zstd data ends too early")
                }
                kind => kind.into(),
            };
        }
        cause = error.source();
    }
    io::Error::new(io::ErrorKind::InvalidData, "its zstd data is damaged")
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within_frame {
                self.within_frame = self.next_frame()?;
                if !self.within_frame {
                    return Ok(0);
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.input, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| decode_error(&error))?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.within_frame = false;
        }
    }
}
