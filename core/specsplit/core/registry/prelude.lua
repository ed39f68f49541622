-- What several scripts need; it stands before each of them.

-- The fields of a replica's hash and nil, or nil and why this incarnation may not write there.
local function fence(key, incarnation)
  local held = redis.call('HMGET', key, 'incarnation', 'seq', 'blocks')
  if not held[1] then
    return nil, 'UNKNOWN'
  end
  if held[1] ~= incarnation then
    return nil, 'WRONG_INCARNATION'
  end
  return {seq = held[2], blocks = tonumber(held[3])}, nil
end

-- SADD or SREM of hashes that lie in one text.
local function each(command, key, hashes)
  local members = {}
  for start = 1, #hashes, 16 do
    members[#members + 1] = string.sub(hashes, start, start + 15)
    if #members == 4000 or start + 16 > #hashes then -- unpack takes no more than 8,000
      redis.call(command, key, unpack(members))
      members = {}
    end
  end
end

-- Keeps the set of members for as long as its longest-lived one.
local function keep_members(key, ttl)
  if redis.call('PTTL', key) < tonumber(ttl) then
    redis.call('PEXPIRE', key, ttl)
  end
end

