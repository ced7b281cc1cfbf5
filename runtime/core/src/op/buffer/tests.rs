use super::*;

#[test]
fn into_vec_returns_the_vector_that_the_buffer_was_made_from() {
    let mut vec = Vec::with_capacity(10);
    vec.extend([1.0f32, 2.0, 3.0]);
    let address = vec.as_ptr();
    let mut buffer = Buffer::from_vec(vec);
    buffer.as_mut_slice::<f32>().unwrap()[1] = 5.0;
    let back = buffer.into_vec::<f32>().unwrap();
    assert_eq!(back, [1.0, 5.0, 3.0]);
    assert_eq!((back.as_ptr(), back.capacity()), (address, 10));
}

#[test]
fn into_vec_of_another_type_returns_the_buffer() {
    let buffer = Buffer::from_vec(vec![1i32, 2]);
    assert!(buffer.as_slice::<u32>().is_none());
    let buffer = buffer.into_vec::<f32>().unwrap_err();
    assert_eq!(buffer.into_vec::<i32>().unwrap(), [1, 2]);
}

#[test]
fn a_bool_is_valid_whatever_a_backend_wrote() {
    let mut flags = [false, true];
    let mut buffer = Buffer::from_mut(&mut flags);
    // SAFETY: the buffer is dropped, which normalizes its bytes, before `flags` is read.
    unsafe { buffer.bytes_to_fill().unwrap() }.copy_from_slice(&[7, 0]);
    drop(buffer);
    assert_eq!(flags, [true, false]);

    let mut owned = Buffer::from_vec(vec![false]);
    owned.as_bytes_mut().unwrap()[0] = 9;
    assert!(owned.as_slice::<bool>().is_none());
    assert_eq!(owned.into_vec::<bool>().unwrap(), [true]);
}

#[test]
fn a_loan_of_bools_holds_bools_even_if_its_buffer_is_never_dropped() {
    let mut odd = Buffer::from_vec(vec![false, false]);
    odd.as_bytes_mut().unwrap().copy_from_slice(&[7, 0]);
    let mut flags = [false, true];
    let mut lent = Buffer::from_mut(&mut flags);
    let error = lent.as_bytes_mut().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(lent.as_mut_slice::<bool>().unwrap(), [false, true]);
    lent.copy_from(&odd).unwrap();
    lent.leak();
    assert_eq!(flags, [true, false]);
}

#[test]
fn a_buffer_over_a_shared_slice_cannot_be_written() {
    let numbers = [1u8, 2];
    let mut buffer = Buffer::from_slice(&numbers);
    assert!(buffer.as_bytes_mut().is_err());
    assert!(buffer.as_mut_slice::<u8>().is_none());
    assert_eq!(buffer.lend().as_slice::<u8>().unwrap(), [1, 2]);
}

#[test]
fn foreign_memory_lives_as_long_as_its_buffer() {
    let owner: Arc<Vec<u64>> = Arc::new(vec![1, 2, 3]);
    let data = NonNull::from(owner.as_slice()).cast::<u8>();
    let watch = Arc::downgrade(&owner);
    // SAFETY: `data` points to three `u64` in the vector that `owner` keeps alive, and nothing writes to
    // them.
    let buffer =
        unsafe { Buffer::from_raw(data, 3, DType::U64, Device::Cpu, Access::Read, owner) }.unwrap();
    assert_eq!(buffer.as_slice::<u64>().unwrap(), [1, 2, 3]);
    assert!(watch.upgrade().is_some());
    drop(buffer);
    assert!(watch.upgrade().is_none());
}

#[test]
fn a_shape_must_hold_all_elements() {
    let buffer = Buffer::from_vec(vec![0u8; 6]);
    assert_eq!(buffer.shape(), [6]);
    let buffer = buffer.with_shape(&[2, 3]).unwrap();
    assert_eq!(buffer.shape(), [2, 3]);
    assert!(buffer.with_shape(&[2, 2]).is_err());
}

#[test]
fn a_copy_owns_its_elements() {
    let mut numbers = [1i16, 2, 3];
    let copy = Buffer::from_mut(&mut numbers).to_owned().unwrap();
    numbers = [0; 3];
    Buffer::from_mut(&mut numbers).copy_from(&copy).unwrap();
    assert_eq!(numbers, [1, 2, 3]);
    assert!(Buffer::from_mut(&mut [0i16; 2]).copy_from(&copy).is_err());
}
