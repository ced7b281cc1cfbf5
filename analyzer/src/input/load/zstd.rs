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

/// Describes an error of the decoder: by the input's error if the input could not be read, as damaged data otherwise.
/// The decoder's own text is for its developers and is left out.
fn decode_error(error: &FrameDecoderError) -> io::Error {
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return match error.kind() {
                kind @ io::ErrorKind::UnexpectedEof => {
                    io::Error::new(kind, "its zstd data ends too early")
                }
                // The decoder only lends the input's error, so a new one with its kind and text is passed on.
                kind => io::Error::new(kind, error.to_string()),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An input that cannot be read.
    struct Refused;

    impl Read for Refused {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("it is too large"))
        }
    }

    #[test]
    fn an_error_of_the_input_keeps_its_text() {
        let data = b"rank 3 waits for rank 5\n".repeat(100_000);
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let packed = ruzstd::encoding::compress_to_vec(&data[..], level);
        // The input fails before a frame, in its header, and in its blocks.
        for length in [0, 2, 6, packed.len() / 2, packed.len() - 1] {
            let mut frames = Frames::new(packed[..length].chain(Refused));
            let error = io::copy(&mut frames, &mut io::sink()).expect_err("the input fails");
            assert_eq!(error.to_string(), "it is too large", "after {length} bytes");
        }
    }
}
