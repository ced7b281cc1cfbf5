//! ndarray's arrays in rcomm's collectives.
//!
//! [`ArrayGroup`] adds the collectives that training needs to [`ProcessGroup`], in terms of arrays:
//!
//! ```no_run
//! # fn step(group: &rcomm::ProcessGroup, gradient: &mut ndarray::Array2<f32>) -> rcomm::Result<()> {
//! use rcomm_ndarray::ArrayGroup;
//! group.all_reduce_array(gradient, rcomm::ReduceOp::Avg)?; // in place
//! # Ok(()) }
//! ```
//!
//! For all other operations [`read`] and [`write()`] lend an array's memory as a [`Buffer`]. [`buffer_of`] and
//! [`array_of`] convert between arrays and buffers that own their memory, which asynchronous operations require.
//!
//! Ranks exchange elements in the order of their indices, so their arrays may have different strides. The memory of an
//! array in standard layout (`is_standard_layout`) is lent; the elements of any other (a transposed or sliced array,
//! images with channels last) are copied, and copied back where the operation writes them.

#![forbid(unsafe_code)]

use ndarray::{Array, ArrayBase, ArrayD, Data, DataMut, Dimension, IxDyn};
use rcomm::{Buffer, Element, Error, ErrorKind, Op, ProcessGroup, Reduction, Result};

/// Lends the elements of an array for reading, in its shape and in the order of their indices.
///
/// # Errors
/// Those of `body`.
pub fn read<T: Element, S: Data<Elem = T>, D: Dimension, R>(
    array: &ArrayBase<S, D>,
    body: impl FnOnce(Buffer<'_>) -> Result<R>,
) -> Result<R> {
    let standard = array.as_standard_layout();
    let elements = standard.as_slice().ok_or_else(not_standard)?;
    body(Buffer::from_slice(elements).with_shape(&shape_of(array))?)
}

/// Lends the elements of an array for reading and writing, in its shape and in the order of their indices. The elements
/// of an array that is not in standard layout stay as they are if `body` fails.
///
/// # Errors
/// Those of `body`.
pub fn write<T: Element, S: DataMut<Elem = T>, D: Dimension, R>(
    array: &mut ArrayBase<S, D>,
    body: impl FnOnce(Buffer<'_>) -> Result<R>,
) -> Result<R> {
    let shape = shape_of(array);
    if let Some(elements) = array.as_slice_mut() {
        return body(Buffer::from_mut(elements).with_shape(&shape)?);
    }
    let mut copy = array.as_standard_layout().into_owned();
    let elements = copy.as_slice_mut().ok_or_else(not_standard)?;
    let result = body(Buffer::from_mut(elements).with_shape(&shape)?)?;
    array.assign(&copy);
    Ok(result)
}

/// Makes a buffer that owns its memory, as asynchronous operations require, of the elements and the shape of an array.
/// Nothing is copied if the array is in standard layout and takes up all of its vector, from the first element on and
/// without spare capacity.
///
/// # Errors
/// None that an array of ndarray can cause.
pub fn buffer_of<T: Element, D: Dimension>(array: Array<T, D>) -> Result<Buffer<'static>> {
    let shape = shape_of(&array);
    let standard = match array.is_standard_layout() {
        true => array,
        false => array.as_standard_layout().into_owned(),
    };
    // An array need not begin at the first element of its vector.
    let (mut elements, offset) = standard.into_raw_vec_and_offset();
    let begin = offset.unwrap_or(0);
    let count = shape.iter().product::<u64>() as usize;
    if begin > 0 {
        elements.drain(..begin);
    }
    elements.truncate(count);
    Buffer::from_vec(elements).with_shape(&shape)
}

/// Makes an array of the elements and the shape of a buffer that owns its memory. Nothing is copied.
///
/// # Errors
/// `InvalidArgument` if the buffer has elements of another type than `T`, or does not own its memory.
pub fn array_of<T: Element>(buffer: Buffer<'static>) -> Result<ArrayD<T>> {
    let shape: Vec<usize> = buffer
        .shape()
        .iter()
        .map(|&extent| extent as usize)
        .collect();
    let elements = buffer.into_vec().map_err(|buffer| {
        let message = format!(
            "{buffer:?} does not have elements of type {}, or does not own its memory",
            std::any::type_name::<T>()
        );
        Error::new(ErrorKind::InvalidArgument, message)
    })?;
    let array = ArrayD::from_shape_vec(IxDyn(&shape), elements);
    array.map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
}

/// Collectives and messages of a group in terms of arrays. Each method does what the operation of its name does.
///
/// # Errors
/// Those of the operation.
///
/// # Blocking
/// Until the operation has completed on this rank.
pub trait ArrayGroup {
    /// Reduces `array` over all ranks, in place.
    fn all_reduce_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        op: impl Into<Reduction>,
    ) -> Result<()>;

    /// Overwrites `array` with the root's array.
    fn broadcast_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        root: u32,
    ) -> Result<()>;

    /// Returns the ranks' arrays, all of one shape, in one array with an additional first dimension: the index in this
    /// dimension is the rank.
    fn all_gather_array<T: Element + Default, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
    ) -> Result<Array<T, D::Larger>>;

    /// Reduces `array` over all ranks and returns this rank's part. The first dimension of `array` must have as many
    /// entries as the group has ranks; the result is the entry of this rank, without this dimension.
    fn reduce_scatter_array<T: Element + Default, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
        op: impl Into<Reduction>,
    ) -> Result<Array<T, D::Smaller>>;

    /// Sends an array with this tag to `peer`.
    fn send_array<T: Element, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
        peer: u32,
        tag: u32,
    ) -> Result<()>;

    /// Fills `array` with the array that `peer` sends with this tag, which has the same number and type of elements.
    fn recv_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        peer: u32,
        tag: u32,
    ) -> Result<()>;
}

impl ArrayGroup for ProcessGroup {
    #[track_caller]
    fn all_reduce_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        op: impl Into<Reduction>,
    ) -> Result<()> {
        let op = op.into();
        write(array, |buffer| self.execute(Op::AllReduce { buffer, op }))?;
        Ok(())
    }

    #[track_caller]
    fn broadcast_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        root: u32,
    ) -> Result<()> {
        write(array, |buffer| self.execute(Op::Broadcast { buffer, root }))?;
        Ok(())
    }

    #[track_caller]
    fn all_gather_array<T: Element + Default, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
    ) -> Result<Array<T, D::Larger>> {
        let mut dims = D::Larger::zeros(array.ndim() + 1);
        dims[0] = self.size() as usize;
        dims.slice_mut()[1..].copy_from_slice(array.shape());
        let mut gathered = Array::default(dims);
        read(array, |input| {
            write(&mut gathered, |output| {
                self.execute(Op::AllGatherSingle { input, output })
            })
        })?;
        Ok(gathered)
    }

    #[track_caller]
    fn reduce_scatter_array<T: Element + Default, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
        op: impl Into<Reduction>,
    ) -> Result<Array<T, D::Smaller>> {
        let op = op.into();
        let part_shape = array.shape().get(1..).unwrap_or_default();
        let mut dims = D::Smaller::zeros(part_shape.len());
        dims.slice_mut().copy_from_slice(part_shape);
        let mut part = Array::default(dims);
        read(array, |input| {
            write(&mut part, |output| {
                self.execute(Op::ReduceScatterSingle { input, output, op })
            })
        })?;
        Ok(part)
    }

    #[track_caller]
    fn send_array<T: Element, S: Data<Elem = T>, D: Dimension>(
        &self,
        array: &ArrayBase<S, D>,
        peer: u32,
        tag: u32,
    ) -> Result<()> {
        read(array, |buffer| self.execute(Op::Send { buffer, peer, tag }))?;
        Ok(())
    }

    #[track_caller]
    fn recv_array<T: Element, S: DataMut<Elem = T>, D: Dimension>(
        &self,
        array: &mut ArrayBase<S, D>,
        peer: u32,
        tag: u32,
    ) -> Result<()> {
        let peer = Some(peer);
        write(array, |buffer| self.execute(Op::Recv { buffer, peer, tag }))?;
        Ok(())
    }
}

fn shape_of<S: ndarray::RawData, D: Dimension>(array: &ArrayBase<S, D>) -> Vec<u64> {
    array.shape().iter().map(|&extent| extent as u64).collect()
}

fn not_standard() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "ndarray gives no slice of an array in standard layout",
    )
}
