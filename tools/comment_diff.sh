#!/usr/bin/env bash
# Comments on a pull request what its launch scripts change: the step of action.yml.
#
# In: FILES (patterns, one a line), HARDWARE, OPTIONS, BASE, PULL_REQUEST (empty: no comment) and
# GitHub's own variables; in the working directory a checkout with the history of BASE.
# The exit code is the largest of `stagewright diff`; 2 of a file that cannot be read anew.
set -euo pipefail

place=$(mktemp -d)
body=$place/body.md
if ! base=$(git merge-base "$BASE" HEAD); then
    echo "::error::$BASE is not in the checkout; give actions/checkout fetch-depth: 0"
    exit 2
fi
git worktree add --quiet --detach "$place/base" "$base"
trap 'git worktree remove --force "$place/base"; rm -rf "$place"' EXIT
ln -s "$PWD" "$place/head"

readarray -t patterns < <(sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' -e '/^$/d' <<< "$FILES")
[ ${#patterns[@]} -gt 0 ] || { echo "::error::files: got none, wanted patterns of launch scripts"; exit 2; }
read -rd '' -a options <<< "$OPTIONS" || true
git diff -z --name-status --find-renames "$base" HEAD -- "${patterns[@]/#/:(glob)}" > "$place/changed"
marker="<!-- stagewright diff $(printf '%s' "$FILES $HARDWARE $OPTIONS" | sha256sum | head -c 12) -->"

compare() { # OLD NEW, of which OLD may be /dev/null: Markdown, or the error as a block of code
    local code=0
    (cd "$place" && stagewright diff "$1" "$2" --hardware "$HARDWARE" --markdown "${options[@]}") \
        > "$place/text" 2> "$place/error" || code=$?
    if [ -s "$place/text" ]; then cat "$place/text"; else sed 's/^/    /' "$place/error"; fi
    return "$code"
}

worst=0
{
    echo "$marker"
    while IFS= read -rd '' kind && IFS= read -rd '' old; do
        new=$old
        [[ $kind != [RC]* ]] || IFS= read -rd '' new
        printf '\n### `%s`\n\n' "$(printf %s "$new" | tr '`[:cntrl:]' "'?")"
        code=0
        case $kind in
            D) echo "Deleted." ;;
            A) compare /dev/null "head/$new" || code=$? ;;
            *)
                compare "base/$old" "head/$new" || code=$?
                if [ "$code" = 2 ]; then # perhaps of the old one alone
                    code=0
                    printf '\nThe new file alone:\n\n'
                    compare /dev/null "head/$new" || code=$?
                fi
                ;;
        esac
        [ "$code" -le "$worst" ] || worst=$code
    done < "$place/changed"
    [ -s "$place/changed" ] || printf '\nNo launch script changes.\n'
} > "$place/all"
head -c 60000 "$place/all" > "$body" # a comment has at most 65,536 characters
cmp -s "$place/all" "$body" || printf '\n\nCut here: the summary of the job has all.\n' >> "$body"
cat "$place/all" >> "${GITHUB_STEP_SUMMARY:-/dev/stdout}"

if [ -n "$PULL_REQUEST" ]; then
    comments=repos/$GITHUB_REPOSITORY/issues
    of_marker=".[] | select(.body | startswith(\"$marker\")) | .id"
    earlier=$(gh api --paginate "$comments/$PULL_REQUEST/comments" --jq "$of_marker") || earlier=
    earlier=${earlier%%$'\n'*}
    if [ -n "$earlier" ]; then
        posted=(gh api --method PATCH "$comments/comments/$earlier" -F "body=@$body")
    elif [ -s "$place/changed" ]; then
        posted=(gh api "$comments/$PULL_REQUEST/comments" -F "body=@$body")
    else
        posted=(true)
    fi
    "${posted[@]}" > /dev/null ||
        echo "::warning::no comment was written: pull requests of forks have a token that may not"
fi
exit "$worst"
